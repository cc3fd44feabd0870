/** One job, live: its state, figures, curves, settings and log. */

import { ACTIVE, ask, at, ENDED, Events, every, get, keyed } from "./api.js";
import { jobButtons, progressOf, stateBadge } from "./controls.js";
import { Curve } from "./curve.js";
import { announce, h, setText, terms } from "./dom.js";
import { attempt, problemBox, problemPlace } from "./errors.js";
import { bytes, flatten, jobName, moment, setting } from "./format.js";
import { beforeAfterPanel } from "./judged.js";
import { Charts, figuresTable } from "./live.js";
import { logPanel, queuePanel } from "./panels.js";
import { Tiles } from "./tiles.js";
import { usePanel } from "./use.js";

const MACHINE_S = 2;
const DRAW_MS = 250;

/** The view `#/jobs/ID`. */
export async function jobView(main, { id, signal }) {
  const path = at("/v1/jobs", id);
  const [first, points] = [await get(path, signal), await get(`${path}/metrics?points=1000`, signal)];
  let job = first;
  const curve = new Curve();
  for (const point of points) curve.add(point);

  const place = problemPlace();
  const [state, progress, tiles, charts] = [stateBadge(job), progressOf(job), new Tiles(), new Charts(signal)];
  const [reason, failure, made, connection] = [
    h("p", { dir: "auto", class: "reason" }),
    h("div"),
    h("div"),
    h("p", { class: "notice", hidden: true }),
  ];
  const rows = h("div");
  const figures = h(
    "details",
    { class: "panel" },
    h("summary", {}, "Table of the last steps and all evaluations"),
    rows,
  );
  /** Responses may overtake each other: an older one does not count. */
  const take = (next) => {
    if (next.last_event < job.last_event) return;
    job = next;
    show();
  };
  const reload = async () => take(await get(path, signal));
  const buttons = jobButtons(job, place, (next) => {
    if (!next) location.hash = "#/jobs";
    else {
      take(next);
      if (!events.source) events.open();
    }
  });
  const queue = queuePanel(job, place, reload);
  const log = logPanel(path, () => !ENDED.includes(job.state), signal);

  const draw = () => {
    charts.draw(curve);
    if (figures.open) rows.replaceChildren(...figuresTable(curve));
  };
  const show = () => {
    for (const part of [state, progress, buttons, queue]) part.update(job);
    tiles.job(job, curve);
    setText(reason, job.state === "done" ? "" : job.reason);
    failure.replaceChildren(...(job.error && job.state === "failed" ? [problemBox(job.error)] : []));
    made.replaceChildren(...adapterLinks(job));
    showUse();
  };
  const use = h("div");
  let used = null;
  /** The form stays as it was filled in while the job's figures change. */
  const showUse = () => {
    const adapter = job.adapters.includes(job.id) ? job.id : job.adapters[0];
    if (!adapter || used === adapter) return;
    used = adapter;
    Promise.all([beforeAfterPanel(job, adapter, signal), usePanel(adapter, signal)])
      .then((panels) => use.replaceChildren(...panels))
      .catch((error) => place.show(error));
  };

  let due = null;
  const later = () => {
    due ??= setTimeout(() => {
      due = null;
      if (!signal.aborted) draw();
    }, DRAW_MS);
  };
  const told = (event) => {
    if (curve.add(event)) later();
    note(job, event);
    if (event.event === "job") {
      announce(`${jobName(job)} is ${event.state}. ${event.reason ?? ""}`);
      reload().catch(() => {});
    } else if (event.event === "warning") {
      warnings.append(h("p", { class: "notice", role: "status", dir: "auto" }, event.message));
    }
    progress.update(job);
    tiles.job(job, curve);
  };
  const warnings = h("div");
  const events = new Events(id, job.last_event, told, (how) => {
    setText(connection, how === "lost" ? "Connection lost; trying again." : "");
    connection.hidden = how !== "lost";
    if (how === "open") reload().catch(() => {});
  });
  if (!ENDED.includes(job.state)) events.open();
  signal.addEventListener("abort", () => events.close());
  figures.addEventListener("toggle", draw);

  main.append(
    h("p", { class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "title" }, h("h1", { dir: "auto" }, jobName(job)), state.element, buttons.element),
    reason,
    connection,
    place.element,
    failure,
    progress.element,
    tiles.element,
    made,
    use,
    warnings,
    charts.element,
    figures,
    h("details", { class: "panel" }, h("summary", {}, "Settings"), settings(job)),
    queue.element,
    log.element,
  );
  show();
  draw();
  every(
    MACHINE_S,
    async () => {
      if (ENDED.includes(job.state) && tiles.machineSeen) return;
      const [machine, daemon] = [await get("/v1/system", signal), await get("/v1/metrics", signal)];
      const own = ACTIVE.includes(job.state) && daemon.running?.job === id ? daemon.running : null;
      tiles.machine(machine, own);
      charts.machine(machine, own);
    },
    signal,
  );
}

/** Update the figures between two responses of the API, as the daemon does. */
function note(job, event) {
  const { progress } = job;
  if (event.event === "start" || event.event === "resume")
    Object.assign(progress, {
      step: event.step ?? 0,
      steps: event.steps,
      backend: event.backend,
      final_loss: undefined,
    });
  else if (event.event === "step") {
    progress.step = event.step + 1;
    progress.first_loss ??= event.loss;
    for (const key of [
      "loss",
      "tokens_per_s",
      "step_time_s",
      "eta_s",
      "learning_rate",
      "peak_memory_bytes",
      "peak_device_bytes",
    ]) {
      if (event[key] !== undefined && event[key] !== null) progress[key] = event[key];
    }
  } else if (event.event === "finish") progress.final_loss = event.final_loss;
  else if (event.event === "checkpoint") progress.checkpoint_step = event.step;
  else if (event.event === "evaluate") progress.evaluation = event;
}

function adapterLinks(job) {
  if (!job.adapters.length) return [];
  const one = (id) => {
    const place = problemPlace();
    const use = h("button", { type: "button" }, "Activate");
    use.addEventListener("click", () =>
      attempt(use, place, () => ask("POST", at("/v1/adapters", id, "/activate")), "The adapter is active"),
    );
    return h(
      "li",
      {},
      h("code", { dir: "auto" }, id),
      h(
        "div",
        { class: "buttons" },
        h(
          "a",
          { class: "button main", href: keyed(at("/v1/adapters", id, "/download")), download: `${id}.zip` },
          "Download",
        ),
        use,
        h("a", { class: "button", href: `#/chat?adapter=${encodeURIComponent(id)}` }, "Try it"),
      ),
      place.element,
    );
  };
  return [
    h(
      "section",
      { class: "panel made" },
      h("h2", {}, job.adapters.length > 1 ? "Adapters" : "Adapter"),
      h("ul", { class: "plain" }, job.adapters.map(one)),
    ),
  ];
}

function settings(job) {
  const given = Object.entries(flatten(job.config)).map(([key, value]) => [key, setting(value)]);
  return terms([
    ["Job", `${job.id}, number ${job.number}`],
    ["Model", job.model],
    ["Artifact", job.artifact],
    ["Data", job.dataset],
    ["Evaluated on", job.eval_dataset],
    ["Starts from adapter", job.adapter],
    ["Created", moment(job.created_s)],
    ["Memory limit", job.limits.memory_bytes ? bytes(job.limits.memory_bytes) : null],
    ["Runs on", job.progress.backend],
    ...given,
  ]);
}
