/** A conversation with the base model and, side by side, with the same model and an adapter. */

import { get, streamed } from "./api.js";
import { announce, choice, h, labelled, setText } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { number } from "./format.js";
import { thumbButtons, thumbsPanel } from "./thumbs.js";

/** The view `#/chat`; `?adapter=ID` chooses one. */
export async function chatView(main, { query, signal }) {
  const [listed, adapters, jobs] = await Promise.all(
    ["/v1/models", "/v1/adapters", "/v1/jobs"].map((path) => get(path, signal)),
  );
  const models = listed.data.filter((one) => one.kind !== "adapter");
  const active = adapters.find((one) => one.active);
  const wanted = query.get("adapter") ?? "";
  const adapter = choice(
    [
      ["", active ? `the active one: ${active.name}` : "none is active: only the base model"],
      ...adapters.map((one) => [one.id, `${one.name} (${one.id})`]),
    ],
    // The newest if none is requested or active: after a training the user wants to try it.
    adapters.some((one) => one.id === wanted) ? wanted : active ? "" : (adapters[0]?.id ?? ""),
  );
  const model = choice(
    models.map((one) => [one.id, one.kind === "artifact" ? `${one.id}, the program's own weights` : one.id]),
    models[0]?.id,
  );
  const mode = choice([
    ["chat", "Chat"],
    ["text", "Continue a text"],
  ]);
  const text = h("textarea", { rows: 3, required: true, maxlength: 100000, dir: "auto" });
  const system = h("input", { type: "text", maxlength: 10000, dir: "auto" });
  const systemField = labelled("System message", system, "Optional.");
  const options = {
    max_tokens: h("input", { type: "number", min: 1, max: 4096, value: 64, required: true }),
    temperature: h("input", { type: "number", min: 0, max: 2, step: "any", value: 0, required: true }),
    top_p: h("input", { type: "number", min: 0.01, max: 1, step: "any", value: 1, required: true }),
    seed: h("input", { type: "number", min: 0, max: 2 ** 31 - 1, value: 0, required: true }),
  };
  const button = h("button", { class: "main" }, "Ask both");
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  const again = h("button", { type: "button" }, "New conversation");
  const [place, log] = [problemPlace(), h("div", { class: "answers" })];
  const judged = thumbsPanel(signal);

  let sides = [];
  let running = null;
  const chosen = () => adapters.find((one) => one.id === (adapter.value || active?.id));
  /** Start over: another model has not seen this conversation. */
  const fresh = () => {
    running?.abort();
    const one = chosen();
    sides = [{ title: "Base model", model: model.value, adapter: null, turns: [] }];
    if (one) sides.push({ title: `With ${one.name || one.id}`, model: model.value, adapter: one.id, turns: [] });
    setText(button, sides.length > 1 ? "Ask both" : "Ask");
    systemField.hidden = mode.value !== "chat";
    log.replaceChildren();
  };
  /** An adapter made by a job of this daemon says which model or program it belongs to. */
  const follow = () => {
    const job = jobs.find((one) => one.id === chosen()?.job);
    const base = job?.artifact ? `artifact:${job.artifact}` : (job?.model ?? chosen()?.base_model);
    if (base && [...model.options].some((option) => option.value === base)) model.value = base;
    fresh();
  };
  adapter.addEventListener("change", follow);
  for (const control of [model, mode, system]) control.addEventListener("change", fresh);
  again.addEventListener("click", () => {
    fresh();
    text.focus();
  });
  stop.addEventListener("click", () => running?.abort());
  signal.addEventListener("abort", () => running?.abort());
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || mode.value !== "chat") return;
    event.preventDefault();
    text.form.requestSubmit();
  });
  follow();

  const send = async () => {
    const asked = { text: text.value, chat: mode.value === "chat", system: system.value };
    const said = Object.fromEntries(Object.entries(options).map(([name, field]) => [name, Number(field.value)]));
    const answers = sides.map((side) => answerOf(side, judged));
    running = new AbortController();
    const here = running;
    stop.hidden = false;
    log.append(exchange(asked.text, answers));
    log.lastChild.scrollIntoView({ block: "nearest" });
    try {
      // One after the other: one model is in memory, and generates one reply at a time.
      for (const answer of answers) if (!here.signal.aborted) await answer.ask(asked, said, here.signal);
      if (!here.signal.aborted) text.value = "";
      announce(here.signal.aborted ? "Stopped" : "Reply complete");
    } catch (error) {
      if (!answers.some((answer) => answer.begun)) log.lastChild?.remove();
      throw error;
    } finally {
      for (const answer of answers) answer.end();
      stop.hidden = true;
      running = null;
      text.focus();
    }
  };
  const form = h(
    "form",
    {
      class: "panel",
      onsubmit: (event) => {
        event.preventDefault();
        attempt(button, place, send);
      },
    },
    labelled("Text", text, "In a chat, Enter sends and Shift+Enter starts a new line.", "field wide"),
    h(
      "details",
      { class: "inner" },
      h("summary", {}, "Length, temperature, seed"),
      h(
        "div",
        { class: "fields" },
        labelled("Most tokens per reply", options.max_tokens),
        labelled("Temperature", options.temperature, "0 takes the most likely token."),
        labelled("Top-p", options.top_p, "Sample from the likeliest tokens up to this sum."),
        labelled("Seed", options.seed),
      ),
    ),
    h("div", { class: "buttons" }, button, stop, again),
    place.element,
  );
  main.append(
    h("h1", {}, "Try it: before and after"),
    h("p", {}, "The same conversation with the base model and with an adapter. Each continues from its own replies."),
    h(
      "div",
      { class: "panel fields" },
      labelled("Adapter", adapter),
      labelled("Base model", model),
      labelled("How", mode),
      systemField,
    ),
    log,
    form,
    judged.element,
  );
}

/** The element of a side's reply, and the function that fills it. */
function answerOf(side, judged) {
  const text = h("p", { class: "answer", dir: "auto", "aria-busy": "true" });
  const about = h("div", { class: "about" });
  const element = h("div", {}, h("h3", { dir: "auto" }, side.title), text, about);
  const answer = { element, begun: false };
  answer.end = () => {
    text.removeAttribute("aria-busy");
    if (!answer.begun) setText(text, "(not asked)");
  };
  answer.ask = async (asked, said, signal) => {
    const system = asked.system ? [{ role: "system", content: asked.system }] : [];
    const turns = [...side.turns, { role: "user", content: asked.text }];
    const prompt = asked.chat ? [...system, ...turns] : asked.text;
    const body = { model: side.model, ...said, stream: true, stream_options: { include_usage: true } };
    if (side.adapter) body.adapter = side.adapter;
    body[asked.chat ? "messages" : "prompt"] = prompt;
    let [whole, tokens, begun] = ["", 0, performance.now()];
    try {
      for await (const { choices, usage } of streamed(
        asked.chat ? "/v1/chat/completions" : "/v1/completions",
        body,
        signal,
      )) {
        answer.begun = true;
        whole += choices[0]?.delta?.content ?? choices[0]?.text ?? "";
        tokens = usage?.completion_tokens ?? tokens;
        setText(text, whole);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
    answer.end();
    const seconds = (performance.now() - begun) / 1000;
    const figures = tokens ? `${number(tokens)} tokens, ${number(Math.round(tokens / seconds))} per second` : "stopped";
    about.append(h("small", {}, figures));
    if (!whole) return setText(text, "(no reply)"); // not a turn: an empty reply can be requested again
    if (asked.chat) side.turns = [...turns, { role: "assistant", content: whole }];
    const row = { prompt, answer: whole, model: side.model, adapter: side.adapter };
    return about.append(thumbButtons(row, side.title, judged.changed));
  };
  return answer;
}

function exchange(asked, answers) {
  return h(
    "article",
    { class: "panel exchange" },
    h("h2", { class: "unseen" }, "Answers"),
    h("blockquote", { dir: "auto" }, asked),
    h(
      "div",
      { class: "pair" },
      answers.map((answer) => answer.element),
      answers.length > 1 ? null : h("p", { class: "soft" }, "No adapter is active; choose one to compare."),
    ),
  );
}
