/** A table with columns of its own: drop-downs, rendered rows, a template, methods in words, and the answers as Excel. */

import assert from "node:assert/strict";
import path from "node:path";
import { readFileSync } from "node:fs";
import { chooseMethod, open, scenario, until, view, WORKER_MS } from "./page.js";

const { TICKETS, NEW_TICKETS, OUT } = process.env;

await scenario(async (page, browser, watched) => {
  const said = [];
  /** A picture of what is shown now, and its words: nothing of a command line stands there. */
  const look = async (name) => {
    said.push(await page.locator("body").innerText());
    for (const width of [1280, 390]) {
      await page.setViewportSize({ width, height: 900 });
      await page.screenshot({ path: path.join(OUT, `${name}-${width}.png`), fullPage: true });
      const inner = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(inner <= width, `${name} scrolls sideways: ${inner} of ${width} px`);
    }
    await page.setViewportSize({ width: 1280, height: 900 });
  };
  await view(page, "new");
  await page.getByLabel("Model", { exact: true }).selectOption("tiny:llama");
  await page.getByLabel("Job name", { exact: true }).fill("tickets");
  await page.getByRole("button", { name: "Next" }).click();
  const upload = page.locator("details", { hasText: "Upload rows" });
  if ((await upload.getAttribute("open")) === null) await upload.locator("summary").first().click();
  await page.getByLabel("File with rows").setInputFiles(TICKETS);
  await page.getByRole("button", { name: "Upload and check" }).click();

  // The names say nothing: the page asks, with a guess and the rows as the model would see them.
  const asked = page.locator(".inner-panel");
  await asked.getByRole("heading", { name: "Which column holds what?" }).waitFor({ timeout: WORKER_MS });
  const [text, label] = ["Text is in column", "Label is in column"].map((name) => asked.getByLabel(name));
  assert.equal(await asked.getByLabel("The rows hold").inputValue(), "classification");
  assert.deepEqual([await text.inputValue(), await label.inputValue()], ["Body", "Team"]);
  const trained = asked.locator(".example mark");
  await trained.first().waitFor({ timeout: WORKER_MS });
  assert.match(await trained.first().innerText(), /repairs|post/);
  await look("columns");
  await label.selectOption("Id");
  await until("the rows of another label", async () => /\d/.test(await trained.first().innerText().catch(() => "")));
  await label.selectOption("Team");
  await page.getByRole("button", { name: "Use these columns" }).click();
  await page.getByText(/\d+ rows: texts with a label each/).waitFor({ timeout: WORKER_MS });
  assert.equal(await asked.isVisible(), false);
  const step = page.locator("section.panel", { hasText: "2. Data" });
  assert.equal(await step.getByLabel("Label is in column").last().inputValue(), "Team", "the job reads as the upload did");

  // A template of one's own.
  await page.getByText("A template of your own").click();
  await page.getByLabel("Template name").fill("ticket-team");
  await page.getByLabel("Prompt", { exact: true }).fill("Ticket: ");
  await page.getByRole("button", { name: "{Body}", exact: true }).click();
  await page.keyboard.type("\nWho answers it?");
  await page.getByLabel("The answer is in column").fill("Team");
  await page.getByLabel("Answers to choose from").fill("repairs = the workshop\npost = the counter");
  await look("template");
  await page.getByRole("button", { name: "Save the template" }).click();
  const template = step.getByLabel("Prompt template").last();
  await until("the new template is chosen", async () => (await template.inputValue()) === "ticket-team");
  const example = step.locator(".example").last();
  await until("the rows in the template", async () => (await example.innerText().catch(() => "")).includes("Who answers it?"));
  assert.match(await example.innerText(), /^[^]*Ticket: [^]*Who answers it\?[^]*the (workshop|counter)/);
  await look("rendered");
  await page.getByRole("button", { name: "Next" }).click();

  // Methods in words; one is recommended, the others are folded away.
  const methods = page.getByRole("group", { name: "Method" });
  assert.equal(await methods.getByRole("radio").filter({ visible: true }).count(), 1);
  await look("method");
  await chooseMethod(page, "prge");
  await look("methods");
  await chooseMethod(page, "mesp");
  await page.getByLabel("Steps", { exact: true }).fill("20");
  await page.getByRole("button", { name: "Next" }).click();
  await page.getByText("Fits: ").waitFor({ timeout: WORKER_MS });
  await look("plan");
  await page.getByRole("button", { name: "Start the job" }).click();
  await page.locator(".state[data-state=done]").waitFor({ timeout: WORKER_MS });

  // Use it: a file whose columns have other names, dropped; the answers as Excel and as CSV.
  await page.getByRole("heading", { name: "Use it" }).waitFor();
  const drop = await page.evaluateHandle(
    ([content, name]) => {
      const held = new DataTransfer();
      held.items.add(new File([Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0))], name));
      return held;
    },
    [readFileSync(NEW_TICKETS).toString("base64"), path.basename(NEW_TICKETS)],
  );
  await page.locator(".drop").dispatchEvent("drop", { dataTransfer: drop });
  const body = page.getByLabel("Body is in column");
  await body.waitFor({ timeout: WORKER_MS });
  await page.getByRole("button", { name: "Answer", exact: true }).click();
  await body.selectOption("Message");
  await page.getByRole("button", { name: "Answer", exact: true }).click();
  await page.getByText("3 rows answered.").first().waitFor({ timeout: WORKER_MS });
  await look("use");
  const files = {};
  for (const [kind, words] of Object.entries({ csv: "CSV", xlsx: "Excel", jsonl: "JSON lines" })) {
    const [download] = await Promise.all([
      page.waitForEvent("download"),
      page.getByRole("button", { name: `Download as ${words}` }).click(),
    ]);
    files[kind] = path.join(OUT, `answers.${kind}`);
    await download.saveAs(files[kind]);
  }
  await page.locator(".drop input").setInputFiles({ name: "broken.xlsx", mimeType: "", buffer: Buffer.from("no zip") });
  await page.getByRole("alert").first().waitFor({ timeout: WORKER_MS });

  await view(page, "data");
  await page.getByRole("rowheader", { name: "ticket-team" }).waitFor();
  for (const details of await page.locator("details").all()) await details.evaluate((one) => (one.open = true));
  await look("data");
  await page.getByRole("button", { name: "Delete the template ticket-team" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
  await page.getByRole("alert").getByText("is read by it").or(page.getByText("No templates of your own yet.")).waitFor();
  const dark = await open(browser, watched, { viewport: { width: 1280, height: 900 }, colorScheme: "dark" });
  await view(dark, "new");
  await dark.getByRole("button", { name: "Next" }).click();
  await dark.getByRole("button", { name: "Next" }).click();
  await dark.getByText("Other methods").click();
  await dark.screenshot({ path: path.join(OUT, "dark-1280.png"), fullPage: true });
  for (const words of said) assert.doesNotMatch(words, /(^|[\s(`'“])--[a-z]/m);
  return { files };
});
