/** A daemon that needs a token: wrong, right, out again; the token stays in no place that a script can read. */

import assert from "node:assert/strict";
import { scenario, view } from "./page.js";

const { TOKEN } = process.env;

await scenario(async (page) => {
  await view(page, "adapters");
  await page.getByRole("heading", { name: "Sign in" }).waitFor();
  await page.getByLabel("Token", { exact: true }).fill("odt_000000000000_wrong");
  await page.keyboard.press("Enter");
  const said = await page.getByRole("alert").innerText();
  for (const part of ["unknown token", "Expected", "Received", "ondevice serve token"])
    assert.ok(said.includes(part), said);
  await page.getByLabel("Token", { exact: true }).fill(TOKEN);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("heading", { name: "Adapters", level: 1 }).waitFor();

  const kept = await page.evaluate(() =>
    [
      document.cookie,
      JSON.stringify(localStorage),
      JSON.stringify(sessionStorage),
      document.documentElement.outerHTML,
    ].join("\n"),
  );
  assert.ok(!kept.includes(TOKEN.slice(5)), "the token is still in the page");
  assert.ok(!kept.includes("ondevice_session"), "a script can read the session's cookie");
  const [cookie] = await page.context().cookies();
  // A cookie reaches every port of the host: alone it opens nothing.
  const stolen = await fetch(new URL("/v1/jobs", page.url()), { headers: { Cookie: `${cookie.name}=${cookie.value}` } });
  assert.equal(stolen.status, 401);
  assert.deepEqual([cookie.httpOnly, cookie.sameSite], [true, "Strict"]);
  await page.reload();
  await page.getByRole("heading", { name: "Adapters", level: 1 }).waitFor();

  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByRole("heading", { name: "Sign in" }).waitFor();
  await page.reload();
  await page.getByRole("heading", { name: "Sign in" }).waitFor();
});
