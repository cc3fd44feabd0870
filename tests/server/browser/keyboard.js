/** A job from the first Tab to its end without a mouse; the focus can always be seen and is never lost. */

import assert from "node:assert/strict";
import { announced, scenario, until, view, WORKER_MS } from "./page.js";

const MOST_TABS = 80;

await scenario(async (page) => {
  await view(page, "jobs");
  await page.keyboard.press("Tab");
  assert.equal(await focused(page, "text"), "Skip to the content");
  await tabTo(page, "New job");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "New job", level: 1 }).waitFor();
  assert.equal(await focused(page, "text"), "New job", "a new view begins at its heading");

  await tabTo(page, "Model", "label");
  await choose(page, "tiny:llama");
  await tabTo(page, "Job name", "label");
  await page.keyboard.type("by keyboard");
  await press(page, "Next");
  assert.equal(await focused(page, "text"), "2. Data", "a new step begins at its heading");
  await tabTo(page, "Max length tokens", "label");
  await page.keyboard.press("Control+A");
  await page.keyboard.type("5"); // less than the least
  await press(page, "Next");
  assert.equal(await focused(page, "label"), "Max length tokens", "the wrong field has the focus");
  await page.keyboard.press("Control+A");
  await page.keyboard.type("32");
  await press(page, "Next");
  assert.equal(await focused(page, "text"), "3. Method");
  await tabTo(page, "Steps", "label");
  await page.keyboard.press("Control+A");
  await page.keyboard.type("1000000");
  await press(page, "Next");
  await page.getByText("Fits: ").waitFor({ timeout: WORKER_MS });
  await press(page, "Start the job");
  await page.getByRole("heading", { name: "by keyboard" }).waitFor();

  await press(page, "Pause by keyboard");
  await page.locator(".state[data-state=paused]").waitFor({ timeout: WORKER_MS });
  assert.match(
    await focused(page, "text"),
    /^(Resume|Cancel) by keyboard$/,
    "the button is gone; the focus is on the next one",
  );
  await press(page, "Resume by keyboard");
  await until("the job waits or runs again", async () =>
    ["queued", "running"].includes(await page.locator(".state").first().innerText()),
  );
  await tabTo(page, "Priority, nightly window, limits");
  await page.keyboard.press("Enter");
  await tabTo(page, "Priority", "label");
  await page.keyboard.press("Control+A");
  await page.keyboard.type("7");
  await page.keyboard.press("Enter");
  await until("it is said", async () => (await announced(page)).includes(": saved"));
  await press(page, "Cancel by keyboard");
  await page.getByRole("dialog").waitFor();
  assert.equal(await focused(page, "text"), "Go back", "the harmless answer comes first");
  await page.keyboard.press("Escape");
  assert.equal(await focused(page, "text"), "Cancel by keyboard", "the focus is back where it was");
  await page.keyboard.press("Enter");
  await page.keyboard.press("Tab");
  assert.equal(await focused(page, "text"), "Cancel the job");
  await page.keyboard.press("Enter");
  await page.locator(".state[data-state=cancelled]").waitFor({ timeout: WORKER_MS });
  await until("the end is said", async () => (await announced(page)).includes("cancelled"));

  await press(page, "Delete by keyboard");
  await page.getByRole("dialog").waitFor();
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Jobs", level: 1 }).waitFor();
});

/** The focused element's text or label; its focus must be visible unless it is a heading, with which nothing can be done. */
async function focused(page, what) {
  const found = await page.evaluate(() => {
    const element = document.activeElement;
    const style = getComputedStyle(element);
    const label = [...(element.labels ?? [])].map((one) => one.textContent.trim()).join(" ");
    const plain = /^(H1|H2|BODY|MAIN)$/.test(element.tagName);
    return {
      text: element.textContent.trim(),
      label,
      seen:
        plain || (element.checkVisibility() && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2),
      html: element.outerHTML.slice(0, 200),
    };
  });
  assert.ok(found.seen, `the focus cannot be seen: ${found.html}`);
  return found[what];
}

/** Tab until the element with this text or label has the focus. */
async function tabTo(page, name, what = "text") {
  const passed = [];
  for (let count = 0; count < MOST_TABS; count += 1) {
    await page.keyboard.press("Tab");
    const found = await focused(page, what);
    if (found === name) return;
    passed.push(found.slice(0, 30));
  }
  throw new Error(`Tab does not reach ${name}: ${passed.join(" | ")}`);
}

async function press(page, name) {
  await tabTo(page, name);
  await page.keyboard.press("Enter");
}

/** Move the focused list to an option, as arrow keys do. */
async function choose(page, value) {
  for (let count = 0; count < MOST_TABS; count += 1) {
    if ((await page.evaluate(() => document.activeElement.value)) === value) return;
    await page.keyboard.press("ArrowDown");
  }
  throw new Error(`arrow keys do not reach ${value}`);
}
