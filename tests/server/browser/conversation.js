/** Several turns with both models side by side: streamed, judged, stopped, exported, begun anew; then the adapter leaves. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { scenario, until, view, WORKER_MS } from "./page.js";

const { ADAPTER, OUT } = process.env;

await scenario(async (page) => {
  const asked = [];
  page.on("request", (request) => {
    if (request.url().endsWith("/v1/chat/completions")) asked.push(request.postDataJSON());
  });
  await view(page, `chat?adapter=${ADAPTER}`);
  await page.getByLabel("System message").fill("Sei kurz.");
  await page.getByText("Length, temperature, seed").click();
  await page.getByLabel("Most tokens per reply").fill("8");
  const text = page.getByLabel("Text", { exact: true });
  const answers = page.locator("article.exchange .answer");
  const ended = (count) =>
    until(`${count} answers`, async () => {
      const thumbs = await page.locator("article.exchange .about small").count();
      return thumbs === count && (await page.locator("article.exchange .answer[aria-busy]").count()) === 0;
    });
  await text.fill("漢字?");
  await text.press("Enter");
  await ended(2);
  const pressed = (name) =>
    until(name, async () => (await page.getByRole("button", { name }).getAttribute("aria-pressed")) === "true");
  await page.getByRole("button", { name: "Thumbs up: With" }).click();
  await page.getByRole("button", { name: "Thumbs down: With" }).click(); // at once: the last click counts
  await pressed("Thumbs down: With");
  await page.getByRole("button", { name: "Thumbs up: Base model" }).click();
  await pressed("Thumbs up: Base model");
  assert.equal(await page.locator(".thumb[aria-pressed=true]").count(), 2);
  const said = await answers.allInnerTexts();
  await text.fill("Warum?");
  await page.getByRole("button", { name: "Ask both" }).click();
  await ended(4);

  // Each side goes on from its own answer; the last question is with an adapter over the same model.
  assert.deepEqual(
    asked.map((body) => body.adapter),
    [undefined, ADAPTER, undefined, ADAPTER],
  );
  assert.ok(asked.every((body) => body.stream && body.model === "tiny:llama"));
  for (const index of [2, 3]) {
    const turns = asked[index].messages;
    assert.deepEqual(
      turns.map((turn) => turn.role),
      ["system", "user", "assistant", "user"],
    );
    assert.equal(turns[1].content, "漢字?");
    assert.equal(turns[2].content.trim(), said[index - 2].trim());
  }

  // Streamed, and stopped in the middle: less than was allowed, and no second side. The network lets the first pieces
  // through and no more, or a fast model would be done before the click.
  await page.evaluate(() => {
    const whole = window.fetch;
    window.fetch = async (path, options) => {
      const answer = await whole(path, options);
      if (!String(path).endsWith("/v1/chat/completions")) return answer;
      window.fetch = whole;
      const reader = answer.body.getReader();
      let left = 6000;
      const stuck = () =>
        new Promise((_, fail) => options.signal.addEventListener("abort", () => fail(options.signal.reason)));
      const pull = async (controller) => {
        if (left <= 0) await stuck();
        const { value, done } = await reader.read();
        if (done) return controller.close();
        controller.enqueue(value.slice(0, left));
        left -= value.length;
        return undefined;
      };
      return new Response(new ReadableStream({ pull }), answer);
    };
  });
  await page.getByLabel("Most tokens per reply").fill("300");
  await page.getByLabel("Temperature").fill("1.5");
  await text.fill("Und dann?");
  await page.getByRole("button", { name: "Ask both" }).click();
  await until("the first letters", async () => (await answers.nth(4).innerText()).length > 3);
  await page.getByRole("button", { name: "Stop" }).click();
  await ended(5);
  assert.equal(await page.locator("article.exchange .about small").last().innerText(), "stopped");
  assert.equal(asked.length, 5);

  await page.getByText("Judged answers").click();
  const [download] = await Promise.all([
    page.waitForEvent("download"),
    page.getByRole("link", { name: "Download as JSON lines" }).click(),
  ]);
  const file = `${OUT}/thumbs.jsonl`;
  await download.saveAs(file);
  const rows = readFileSync(file, "utf8").trim().split("\n").map(JSON.parse);
  assert.deepEqual(
    rows.map((row) => [row.adapter, row.label, row.prompt.at(-1).content]),
    [
      [ADAPTER, false, "漢字?"],
      [null, true, "漢字?"],
    ],
  );
  await page.getByRole("button", { name: "Forget" }).first().click();
  await until("one row", async () => (await page.getByRole("button", { name: "Forget" }).count()) === 1);

  await page.getByRole("button", { name: "New conversation" }).click();
  assert.equal(await page.locator("article.exchange").count(), 0);
  await page.getByLabel("How", { exact: true }).selectOption("text");
  await page.getByLabel("Most tokens per reply").fill("9999");
  await page.getByLabel("Most tokens per reply").evaluate((field) => field.removeAttribute("max"));
  await text.fill("a");
  await page.getByRole("button", { name: "Ask both" }).click();
  const problem = page.getByRole("alert");
  await problem.waitFor({ timeout: WORKER_MS });
  assert.match(await problem.innerText(), /longer than the model takes\s+Expected\s+at most 512 tokens/);
  assert.equal(await page.locator("article.exchange").count(), 0);

  // The adapter leaves in another program's form; what cannot be written says why.
  await view(page, "adapters");
  const form = page.locator("form", { has: page.getByRole("heading", { name: "Convert to" }) });
  await form.getByLabel("Adapter", { exact: true }).selectOption(ADAPTER);
  await form.getByLabel("Form", { exact: true }).selectOption("gguf");
  assert.equal(await form.getByLabel("Type of the weights").isVisible(), true);
  await form.getByLabel("Form", { exact: true }).selectOption("peft");
  assert.equal(await form.getByLabel("Type of the weights").isVisible(), false);
  await form.getByRole("button", { name: "Convert", exact: true }).click();
  const link = form.getByRole("link", { name: `Download ${ADAPTER}-peft.zip` });
  await link.waitFor({ timeout: WORKER_MS });
  const [zip] = await Promise.all([page.waitForEvent("download"), link.click()]);
  await zip.saveAs(`${OUT}/peft.zip`);
  await page.reload(); // it is still there
  await link.waitFor();
  await form.getByRole("button", { name: "Forget" }).click();
  await until("it is gone", async () => (await link.count()) === 0);
  return { file, zip: `${OUT}/peft.zip` };
});
