/** A finished job answers pasted texts, says probabilities, and its answers are downloaded as CSV. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { scenario, view, WORKER_MS } from "./page.js";

const { JOB, SHOT, ROWS } = process.env;
const READING_MS = 1000;

await scenario(async (page) => {
  await view(page, `jobs/${JOB}`);
  await page.getByRole("heading", { name: "Use it" }).waitFor();
  await page.getByRole("button", { name: "Answer", exact: true }).click();
  assert.match(await page.getByRole("alert").innerText(), /There is no row/);
  await page.getByLabel("Texts", { exact: true }).fill('schön "1", 漢字\n\nschlecht 2');
  await page.getByRole("button", { name: "Answer", exact: true }).click();
  const table = page.getByRole("table", { name: "Answers" });
  await table.waitFor({ timeout: WORKER_MS });
  const rows = await table.locator("tbody tr").allInnerTexts();
  assert.equal(rows.length, 2);
  for (const row of rows) assert.match(row, /(yes|no)[^]*[01]\.\d+/);
  if (SHOT) await page.screenshot({ path: SHOT, fullPage: true });
  const [download] = await Promise.all([
    page.waitForEvent("download"),
    page.getByRole("button", { name: "Download as CSV" }).click(),
  ]);
  const csv = readFileSync(await download.path(), "utf8");
  // Answers wait for a file that is still being read.
  await page.route("**/v1/tables/read*", async (route) => {
    await new Promise((resolve) => setTimeout(resolve, READING_MS));
    await route.continue();
  });
  await page.getByLabel("or drop a file here").setInputFiles(ROWS);
  await page.getByRole("button", { name: "Answer", exact: true }).click();
  await page.getByText("12 rows answered.").first().waitFor({ timeout: WORKER_MS });
  return { csv };
});
