/** From ratings to a job that trains on them: offered, planned, started by hand; then before and after side by side. */

import assert from "node:assert/strict";
import { until, scenario, url, view, WORKER_MS } from "./page.js";

const { SHOTS } = process.env;

await scenario(async (page) => {
  const jobs = async () => (await page.request.get(`${url}/v1/jobs`)).json();
  const shot = (name) => (SHOTS ? page.screenshot({ path: `${SHOTS}/${name}.png`, fullPage: true }) : null);
  /** Nothing goes sideways on a phone. */
  const narrow = async () => {
    await page.setViewportSize({ width: 360, height: 740 });
    assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 360);
    await page.setViewportSize({ width: 1100, height: 800 });
  };
  await view(page, "chat");
  await page.getByText("Judged answers").click();
  await page.getByText("10 up, 10 down").waitFor();
  const offer = page.getByRole("button", { name: "Train on 20 thumbs" });
  assert.equal((await jobs()).length, 0);
  await offer.click();
  const start = page.getByRole("button", { name: "Start the job" });
  await page.getByText("Fits:").waitFor({ timeout: WORKER_MS });
  assert.match(await page.locator(".preview").innerText(), /Rows\s+20/);
  assert.equal(await page.locator(".preview mark").count() > 1, true);
  // A change plans anew, and a wrong one plans nothing.
  const times = page.getByLabel("Times through the thumbs");
  await times.fill("2");
  await times.blur();
  await until("planned anew", async () => await start.isEnabled());
  await narrow();
  await shot("offer");
  assert.equal((await jobs()).length, 0); // nothing is made before the last button
  await start.click();
  await page.getByRole("heading", { name: "Before and after", exact: true }).waitFor({ timeout: WORKER_MS });
  const [job] = await jobs();
  assert.equal(job.config.train.steps, 8);
  assert.notEqual(job.dataset, job.eval_dataset);
  const panel = page.locator("section", { has: page.getByRole("heading", { name: "Before and after", exact: true }) });
  assert.match(await panel.innerText(), /4 kept-back thumbs/);
  assert.match(await panel.innerText(), /95% interval/);
  assert.equal(await panel.locator("article").count(), 0); // no reply is generated unasked
  await panel.getByRole("button", { name: "Ask both" }).click();
  await until("replies", async () => {
    const busy = await panel.locator(".answer[aria-busy]").count();
    return busy === 0 && (await panel.locator("article").count()) === 4;
  });
  for (const title of ["Before", "After"])
    assert.equal(await panel.getByRole("heading", { name: title, exact: true }).count(), 4);
  assert.equal(await page.getByRole("heading", { name: "Use it" }).count(), 0); // a conversation has no rows
  await narrow();
  await shot("after");
  return { job: job.id };
});
