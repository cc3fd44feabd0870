/** A new job in four steps: model, data, method, plan. Nothing is created before the last button. */

import { ask, get, listModels, post } from "./api.js";
import { announce, h } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { planParts } from "./plan.js";
import { ownTemplates } from "./templates.js";
import { dataStep, methodStep, modelStep, queueStep } from "./wizard_steps.js";

const TITLES = ["Model", "Data", "Method", "Plan and start"];

/** The view `#/new`. */
export async function wizardView(main, { signal }) {
  const [models, settings, artifacts, adapters] = await Promise.all([
    listModels(signal),
    ...["/v1/settings", "/v1/artifacts", "/v1/adapters"].map((path) => get(path, signal)),
  ]);
  const templates = await ownTemplates(signal);
  settings.own = templates.all;
  const known = { schema: settings.run_file, settings, templates, models, artifacts, adapters };
  const place = problemPlace();
  const model = modelStep(known, signal);
  const data = dataStep(known, () => model.source(), signal);
  const method = methodStep(known);
  const queue = queueStep();
  await data.load();
  const plan = h("div", { class: "plan" });
  const steps = [model, data, method, queue];
  const force = h("input", { type: "checkbox", id: "force" });
  const forced = h(
    "p",
    { hidden: true },
    h("label", { class: "tick", for: "force" }, force, " Start even if the plan says it does not fit"),
  );
  queue.element.append(plan, forced);

  const crumbs = TITLES.map((text, index) =>
    h("li", {}, h("span", { class: "step-number", "aria-hidden": "true" }, String(index + 1)), text),
  );
  const heads = TITLES.map((text, index) => h("h2", { tabindex: "-1" }, `${index + 1}. ${text}`));
  const sections = steps.map((step, index) =>
    h("section", { class: "panel", hidden: true }, heads[index], step.element),
  );
  const [back, next, start] = [
    h("button", { type: "button" }, "Back"),
    h("button", { type: "button", class: "main" }, "Next"),
    h("button", { class: "main" }, "Start the job"),
  ];
  let current = 0;
  // A lost response must not make a second job of the same form; a changed form is another job.
  let key = crypto.randomUUID?.() ?? String(Math.random());

  const request = () => {
    const config = { method: method.values(), train: method.train(), data: data.values() };
    if (model.kind() === "artifact") {
      const { learning_rate } = config.method;
      config.method = learning_rate === undefined ? {} : { learning_rate };
      for (const key of ["seed", "batch_size"]) delete config.train[key];
    } else config.model = method.model();
    for (const section of Object.keys(config)) if (!Object.keys(config[section]).length) delete config[section];
    return { ...model.values(), ...data.sets(), ...queue.values(), config, force: force.checked };
  };
  let planning = new AbortController();
  signal.addEventListener("abort", () => planning.abort());
  /** Plan the form's present values; an older plan in progress is dropped. */
  const showPlan = async () => {
    planning.abort();
    planning = new AbortController();
    const mine = planning.signal;
    place.clear();
    start.disabled = true;
    forced.hidden = true;
    plan.replaceChildren(h("p", { class: "soft" }, "Planning…"));
    try {
      const found = await post("/v1/jobs", { ...request(), dry_run: true }, mine);
      if (mine.aborted) return;
      plan.replaceChildren(...planParts(found));
      forced.hidden = found.plan.fits;
      if (found.plan.fits) force.checked = false;
      start.disabled = !found.plan.fits && !force.checked;
      announce(found.plan.fits ? "The plan fits." : "The plan does not fit.");
    } catch (error) {
      if (mine.aborted) return;
      plan.replaceChildren();
      refused(error);
    }
  };
  const refused = (error) => {
    place.show(error);
    const [, section, key] = /'(method|train|data|model)\.(?:[a-z-]+\.)?([a-z_]+)'/.exec(error.message ?? "") ?? [];
    const field = section === "data" ? data.mark(key) : section ? method.mark(section, key) : null;
    if (field) go(section === "data" ? 1 : 2, field);
  };
  const go = (index, focus = null) => {
    current = index;
    sections.forEach((section, number) => {
      section.hidden = number !== index;
    });
    crumbs.forEach((crumb, number) => {
      crumb.classList.toggle("done", number < index);
      if (number === index) crumb.setAttribute("aria-current", "step");
      else crumb.removeAttribute("aria-current");
    });
    back.hidden = index === 0;
    next.hidden = index === TITLES.length - 1;
    start.hidden = !next.hidden;
    method.artifact(model.kind() === "artifact");
    if (index === 2 && model.kind() === "model") {
      post("/v1/method", { model: model.source().model }, signal)
        .then(method.suggest)
        .catch(() => {}); // the plan names what is wrong with a model
    }
    (focus ?? heads[index]).focus();
    if (index === TITLES.length - 1) showPlan();
    else planning.abort();
  };
  const valid = () => {
    const wrong = [...sections[current].querySelectorAll("input, select")].find(
      (control) => !control.closest("[hidden], .upload") && !control.checkValidity(),
    );
    const folded = wrong?.closest("details");
    if (folded) folded.open = true;
    wrong?.reportValidity();
    return !wrong;
  };
  main.addEventListener(
    "change",
    () => {
      key = crypto.randomUUID?.() ?? String(Math.random());
    },
    { signal },
  );
  queue.element.addEventListener("change", (event) => {
    if (event.target === force) start.disabled = !force.checked;
    else if (valid()) showPlan();
  });
  next.addEventListener("click", () => {
    place.clear();
    if (valid()) go(current + 1);
  });
  back.addEventListener("click", () => {
    place.clear();
    go(current - 1);
  });

  const form = h(
    "form",
    {
      novalidate: true,
      onsubmit: (event) => {
        event.preventDefault();
        if (current < TITLES.length - 1) next.click();
        else if (valid() && !start.disabled) {
          attempt(
            start,
            { clear: place.clear, show: refused },
            async () => {
              const job = await ask("POST", "/v1/jobs", request(), signal, { "Idempotency-Key": key });
              location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
            },
            "The job is queued",
          );
        }
      },
    },
    sections,
    place.element,
    h("div", { class: "buttons ends" }, back, next, start),
  );
  main.append(h("h1", {}, "New job"), h("ol", { class: "steps", "aria-label": "Where you are" }, crumbs), form);
  go(0, document.body);
}
