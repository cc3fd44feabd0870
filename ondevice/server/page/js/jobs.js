/** The queue: running, waiting and ended jobs. */

import { ask, at, ENDED, every, get } from "./api.js";
import { folded, h, keyed, setText } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { jobButtons, progressOf, stateBadge } from "./controls.js";
import { jobName, moment, number } from "./format.js";

const EVERY_S = 2;

/** The view `#/jobs`. */
export async function jobsView(main, { signal }) {
  const place = problemPlace();
  const waiting = jobsTable("Running and waiting, in the order they will run", "Priority");
  const ended = jobsTable("Ended, the newest first", "Ended");
  const none = h(
    "div",
    { class: "panel", hidden: true },
    h("p", {}, "No jobs yet."),
    h("p", {}, h("a", { href: "#/new", class: "button main" }, "Start the first one")),
  );
  const load = async () => {
    const jobs = await get("/v1/jobs", signal);
    const [old, now] = [
      jobs.filter((job) => ENDED.includes(job.state)),
      jobs.filter((job) => !ENDED.includes(job.state)),
    ];
    keyed(
      waiting.body,
      now,
      (job) => job.id,
      (job) => row(job, place, load, true),
    );
    keyed(
      ended.body,
      old,
      (job) => job.id,
      (job) => row(job, place, load, false),
    );
    for (const [list, jobs] of [
      [waiting, now],
      [ended, old],
    ]) {
      list.element.hidden = !jobs.length;
      list.update();
    }
    none.hidden = jobs.length > 0;
  };
  await load();
  main.append(
    h("div", { class: "title" }, h("h1", {}, "Jobs"), h("a", { href: "#/new", class: "button main" }, "New job")),
    place.element,
    none,
    waiting.element,
    ended.element,
  );
  every(EVERY_S, load, signal);
}

function jobsTable(caption, last) {
  const body = h("tbody", {});
  const heads = ["Job", "State", "Training", "Progress", last, "Actions"];
  const element = h(
    "table",
    { class: "cards jobs" },
    h("caption", {}, caption),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        heads.map((head) => h("th", { scope: "col" }, head)),
      ),
    ),
    body,
  );
  return { ...folded(element), body };
}

function row(job, place, changed, waits) {
  const name = h("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, dir: "auto" }, jobName(job));
  const [state, progress] = [stateBadge(job), progressOf(job)];
  const buttons = jobButtons(job, place, changed);
  const [reason, figures, ended] = [h("small", { dir: "auto" }), h("small", {}), h("span", {})];
  const order = waits ? priority(job, place, changed) : null;
  const cell = (label, ...content) => h("td", { "data-label": label }, content);
  const method = job.method ?? "artifact";
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, name, h("small", {}, `number ${job.number}`)),
    cell("State", state.element, reason),
    cell("Training", h("span", { dir: "auto" }, method), h("small", { dir: "auto" }, job.model ?? job.artifact)),
    cell("Progress", progress.element, figures),
    waits ? cell("Priority", order.element) : cell("Ended", ended),
    cell("Actions", buttons.element),
  );
  const update = (next) => {
    for (const part of [state, progress, buttons]) part.update(next);
    order?.update(next);
    setText(reason, next.state === "done" ? "" : (next.error?.message ?? next.reason));
    setText(
      figures,
      next.progress.loss === undefined
        ? ""
        : `loss ${number(next.progress.first_loss)} → ${number(next.progress.final_loss ?? next.progress.loss)}${next.progress.final_loss === undefined ? "" : ", mean of the last tenth"}`,
    );
    setText(ended, moment(next.ended_s));
  };
  update(job);
  return { element, update };
}

/** The priority of a job, which is sent when it changes. */
export function priority(job, place, changed) {
  const input = h("input", {
    type: "number",
    min: -1000,
    max: 1000,
    step: 1,
    value: job.priority,
    "aria-label": `Priority of ${jobName(job)}; higher runs first`,
  });
  let known = job.priority;
  input.addEventListener("change", () =>
    attempt(
      input,
      place,
      async () => {
        await ask("PATCH", at("/v1/jobs", job.id), { priority: Number(input.value) });
        known = Number(input.value);
        await changed();
      },
      `Priority of ${jobName(job)} is ${input.value}`,
    ),
  );
  const update = (next) => {
    if (next.priority !== known && document.activeElement !== input) input.value = next.priority;
    known = next.priority;
  };
  return { element: input, update };
}
