/** Pictures of the page from a real run, for the documentation: docs/images/page.py starts the daemon and calls this. */

import path from "node:path";
import { chooseMethod, lastStep, open, scenario, until, url, view } from "./page.js";

const { OUT, MODEL, TRAIN, VALID } = process.env;
const RUN_MS = 30 * 60_000;
const WIDE = { width: 1000, height: 760 };
const NARROW = { width: 360, height: 1040 };
const QUESTIONS = ["The lamp flickers, the hinge squeaks, and after a week the switch fell off. It was"];

await scenario(
  async (page, browser, watched) => {
    const dark = await open(browser, watched, { viewport: WIDE, colorScheme: "dark" });
    const narrow = await open(browser, watched, { viewport: NARROW });
    const take = (shown, name) => shown.screenshot({ path: path.join(OUT, `page-${name}.png`) });

    const first = await wizard(page, { name: "reviews, LoRA", method: "lora", rate: "0.0003", steps: 60 }, take);
    await wizard(page, { name: "reviews, LoRA-FA", method: "lora-fa", rate: "0.001", steps: 60 });
    for (const shown of [page, dark, narrow]) await view(shown, `jobs/${first}`);
    await until("half of the run", async () => (await lastStep(dark)) >= 36, RUN_MS);
    await until("half of the run", async () => (await lastStep(narrow)) >= 36, RUN_MS);
    for (const [shown, name] of [
      [page, "job"],
      [dark, "job-dark"],
      [narrow, "job-360"],
    ])
      await take(shown, name);
    await view(narrow, "jobs");
    await take(narrow, "jobs-360");
    await view(page, "jobs");
    await page.setViewportSize({ ...WIDE, height: 400 });
    await take(page, "jobs");

    await until("both runs", async () => (await page.locator(".state[data-state=done]").count()) === 2, RUN_MS);
    await page.setViewportSize({ ...WIDE, height: 1000 });
    await view(page, "compare");
    await page.locator("canvas").first().waitFor();
    await take(page, "compare");
    await page.setViewportSize({ ...WIDE, height: 640 });
    await view(page, `chat?adapter=${first}`);
    await page.getByLabel("How", { exact: true }).selectOption("text");
    await page.getByText("Length, temperature, seed").click();
    await page.getByLabel("Most tokens per reply").fill("6");
    await page.getByText("Length, temperature, seed").click();
    for (const question of QUESTIONS) {
      await page.getByLabel("Text", { exact: true }).fill(question);
      await page.getByRole("button", { name: "Ask both" }).click();
      await until(
        "the answers",
        async () => (await page.locator(".exchange").getByText(/\d+ a second/).count()) >= 2 * (QUESTIONS.indexOf(question) + 1),
        RUN_MS,
      );
    }
    await take(page, "chat");
  },
  { viewport: WIDE },
);

/** Create a job with the wizard; pictures of the rows and of the plan where `take` is given. */
async function wizard(page, { name, method, rate, steps }, take = null) {
  await view(page, "new");
  await page.getByLabel("Model", { exact: true }).selectOption(MODEL);
  await page.getByLabel("Job name", { exact: true }).fill(name);
  await page.getByRole("button", { name: "Next" }).click();
  await page.getByLabel("Train on", { exact: true }).selectOption(TRAIN);
  await page.getByLabel("Evaluate on", { exact: true }).selectOption(VALID);
  await page.getByLabel("Prompt template", { exact: true }).first().selectOption("sst2");
  await page.getByLabel("Max length tokens", { exact: true }).fill("40");
  if (take) {
    await page.getByRole("button", { name: "Preview the rows" }).click();
    await page.locator(".example").first().waitFor({ timeout: RUN_MS });
    await page.evaluate(() => window.scrollTo(0, document.querySelector(".preview").getBoundingClientRect().top - 260));
    await take(page, "rows");
  }
  await page.getByRole("button", { name: "Next" }).click();
  await chooseMethod(page, method);
  await page.getByLabel("Learning rate", { exact: true }).fill(rate);
  await page.getByLabel("Steps", { exact: true }).fill(String(steps));
  await page.getByLabel("Eval every", { exact: true }).fill("10");
  await page.getByText("More settings of the loop").click();
  await page.getByLabel("Eval rows", { exact: true }).fill("20");
  await page.getByRole("button", { name: "Next" }).click();
  await page.getByText("Fits: ").waitFor({ timeout: RUN_MS });
  if (take) {
    await page.setViewportSize({ ...WIDE, height: 960 });
    await take(page, "plan");
    await page.setViewportSize(WIDE);
  }
  await page.getByRole("button", { name: "Start the job" }).click();
  await page.waitForURL(/#\/jobs\/.+/);
  if (!page.url().startsWith(url)) throw new Error(page.url());
  return decodeURIComponent(page.url().split("/").pop());
}
