/** An exported program: a zip that is none is refused, the right one is uploaded, planned, started and asked. */

import assert from "node:assert/strict";
import { announced, scenario, until, url, view, WORKER_MS } from "./page.js";

const { ARTIFACT, ROWS } = process.env;

await scenario(async (page) => {
  await view(page, "data");
  const form = page.locator("details", { hasText: "Upload an artifact" });
  await form.locator("summary").click();
  await form
    .getByLabel("Zip of the artifact's folder")
    .setInputFiles({ name: "none.zip", mimeType: "application/zip", buffer: Buffer.from("no zip") });
  await form.getByRole("button", { name: "Upload the artifact" }).click();
  const refused = form.getByRole("alert");
  await refused.waitFor({ timeout: WORKER_MS });
  assert.match(await refused.innerText(), /Expected[^]*zip/);
  await form.getByLabel("Zip of the artifact's folder").setInputFiles(ARTIFACT);
  await form.getByLabel("Name", { exact: true }).fill("program");
  await form.getByRole("button", { name: "Upload the artifact" }).click();
  await page.getByRole("rowheader", { name: "program" }).waitFor({ timeout: WORKER_MS });

  await page.getByText("Upload rows").click();
  await page.getByLabel("File with rows").setInputFiles(ROWS);
  await page.getByRole("button", { name: "Upload and check" }).click();
  await page.getByText(/\d+ rows: /).waitFor({ timeout: WORKER_MS });

  await view(page, "new");
  await page.getByLabel("An exported program").check();
  assert.equal(await page.getByLabel("Model", { exact: true }).isVisible(), false);
  for (let step = 0; step < 2; step += 1) await page.getByRole("button", { name: "Next" }).click();
  await page.getByText("Method, batch and seed are fixed").waitFor();
  assert.equal(await page.getByRole("group", { name: "Method" }).isVisible(), false);
  for (const fixed of ["Batch size", "Rank"])
    assert.equal(await page.getByLabel(fixed, { exact: true }).isVisible(), false, fixed);
  await page.getByLabel("Learning rate", { exact: true }).fill("0.02");
  await page.getByLabel("Steps", { exact: true }).fill("5");
  await page.getByRole("button", { name: "Next" }).click();
  await page.getByText("Fits: ").waitFor({ timeout: WORKER_MS });
  await page.getByRole("button", { name: "Start the job" }).click();
  await page.locator(".state[data-state=done]").waitFor({ timeout: WORKER_MS });
  await page.getByText("Settings", { exact: true }).click();
  const settings = await page.locator("details", { hasText: "method.learning_rate" }).innerText();
  assert.match(settings, /program/);
  assert.match(settings, /0\.02/);

  await page.getByRole("link", { name: "Try it" }).click();
  assert.equal(await page.getByLabel("Base model", { exact: true }).inputValue(), "artifact:program");
  await page.getByLabel("Text", { exact: true }).fill("schön");
  await page.getByRole("button", { name: "Ask both" }).click();
  await page.locator("article.exchange .answer").nth(1).waitFor({ timeout: WORKER_MS });

  // A job over its time limit fails; the limit is raised on its page, and it goes on.
  const [{ id: dataset }] = await (await page.request.get(`${url}/v1/datasets`)).json();
  const config = { train: { steps: 999999 } };
  const sent = { data: { artifact: "program", dataset, config, limits: { time_s: 1 } } };
  const { id } = await (await page.request.post(`${url}/v1/jobs`, sent)).json();
  await view(page, `jobs/${id}`);
  await page.locator(".state[data-state=failed]").waitFor({ timeout: WORKER_MS });
  await page.getByText("Priority, nightly window, limits").click();
  await page.getByLabel("Time limit, hours", { exact: true }).fill("2.5");
  await page.getByRole("button", { name: "Save" }).click();
  await until("it is said", async () => (await announced(page)).includes(": saved"));
  const { limits } = await (await page.request.get(`${url}/v1/jobs/${id}`)).json();
  assert.deepEqual(limits, { memory_bytes: null, time_s: 9000, retries: 3 });
  await page.getByRole("button", { name: "Resume" }).click();
  await page.locator(".state[data-state=running]").waitFor({ timeout: WORKER_MS });
  await page.request.post(`${url}/v1/jobs/${id}/cancel`, { data: {} });
  await page.locator(".state[data-state=cancelled]").waitFor({ timeout: WORKER_MS });

  await view(page, "data");
  await page.getByRole("button", { name: "Delete the program program" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
  await page.getByText("No exported programs in the store.").waitFor();
});
