/** What a person has done stays: a form when the session ends, an upload after a reload, a refused file's place empty. */

import assert from "node:assert/strict";
import { scenario, until, view, WORKER_MS } from "./page.js";

const { ROWS, BAD_ROWS, LARGE, TOKEN } = process.env;

await scenario(async (page) => {
  const signIn = async () => {
    await page.getByLabel("Token", { exact: true }).fill(TOKEN);
    await page.getByRole("button", { name: "Sign in" }).click();
  };
  await view(page, "new");
  await signIn();
  await page.getByLabel("Job name", { exact: true }).fill("kept");
  await page.getByLabel("Model", { exact: true }).selectOption("tiny:gpt2");
  await page.getByRole("button", { name: "Next" }).click();
  assert.equal(await page.getByLabel("Prompt template").filter({ visible: true }).count(), 0, "there is no file yet");

  const train = page.getByLabel("Train on", { exact: true });
  const send = async (file) => {
    await page.getByLabel("File with rows").setInputFiles(file);
    await page.getByRole("button", { name: "Upload and check" }).click();
  };
  await send(ROWS);
  await page.getByText(/\d+ rows: /).waitFor({ timeout: WORKER_MS });
  const words = await train.locator("option:checked").innerText();
  assert.match(words, /rows\.jsonl, 16 rows \(texts with a label each\), data/);
  await send(BAD_ROWS);
  await page.getByRole("alert").waitFor({ timeout: WORKER_MS });
  assert.equal(await train.inputValue(), "", "the refused file's place holds another data set");
  await train.selectOption({ label: words });
  await page.getByLabel("Max length tokens", { exact: true }).fill("48");

  // The session ends while the form is half filled.
  await page.context().clearCookies();
  await page.getByRole("button", { name: "Preview the rows" }).click();
  await page.getByRole("heading", { name: "Sign in" }).waitFor();
  await signIn();
  assert.equal(await page.getByLabel("Max length tokens", { exact: true }).inputValue(), "48");
  assert.equal(await train.locator("option:checked").innerText(), words);
  await page.getByRole("button", { name: "Next" }).click();
  await until("the method of the model", async () => (await page.getByRole("group", { name: "Method" }).locator("input:checked").inputValue()) === "lora");

  // A reload in the middle of an upload: the same file goes on where the daemon stands.
  const offsets = [];
  let held = null;
  await page.route("**/v1/uploads/**", async (route) => {
    const url = new URL(route.request().url());
    if (route.request().method() !== "PUT") return route.continue();
    offsets.push(Number(url.searchParams.get("offset")));
    if (held === null && offsets.length === 2) {
      held = route; // never answered: the page is reloaded
      return undefined;
    }
    return route.continue();
  });
  await view(page, "data");
  const open = async () => {
    await page.getByText("Upload rows", { exact: true }).click();
    await send(LARGE);
  };
  await open();
  await until("the second part", () => held);
  await page.reload();
  await page.locator("main:not([aria-busy]) h1").waitFor();
  await open();
  await page.getByText(/\d+ rows: /).waitFor({ timeout: WORKER_MS });
  assert.deepEqual(offsets.slice(0, 3), [0, 4194304, 4194304], `parts at ${offsets}`);
  assert.ok(!(await page.evaluate(() => Object.keys(sessionStorage).some((key) => key.startsWith("upload ")))));

  // On a phone a list of a dozen cards is folded.
  await page.setViewportSize({ width: 390, height: 800 });
  const models = page.getByRole("table", { name: "Models on this machine" }).locator("tbody tr");
  const all = await models.count();
  assert.ok(all > 8);
  assert.equal(await models.filter({ visible: true }).count(), 4);
  await page.getByRole("button", { name: `Show all ${all}` }).click();
  assert.equal(await models.filter({ visible: true }).count(), all);

  await page.goto(`${page.url().split("#")[0]}#/jobs/%`);
  await page.getByRole("heading", { name: "This cannot be shown" }).waitFor();
  return {};
});
