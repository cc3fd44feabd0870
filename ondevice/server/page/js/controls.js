/** The actions on a job, the same in the list and on its page. */

import { ACTIVE, at, ask, ENDED, post } from "./api.js";
import { h, setText, showOnly, sure } from "./dom.js";
import { attempt } from "./errors.js";
import { duration, jobName, number } from "./format.js";

const CAN = {
  pause: ["queued", "running"],
  resume: ["paused", "failed"],
  cancel: ["queued", "running", "pausing", "paused", "failed"],
  delete: ENDED,
};

/** Buttons for the job's state. `changed` gets the job after an action, null after its deletion. */
export function jobButtons(job, place, changed) {
  let current = job;
  const act = (button, verb, done) =>
    attempt(
      button,
      place,
      async () => changed(await post(at("/v1/jobs", current.id, `/${verb}`))),
      `${jobName(current)}: ${done}`,
    );
  const make = (verb, text, done) => {
    const button = h("button", { type: "button" }, text, h("span", { class: "unseen" }, ` ${jobName(job)}`));
    button.addEventListener("click", async () => {
      if (
        verb === "cancel" &&
        !(await sure(`Cancel ${jobName(current)} for good? Its progress is lost.`, "Cancel the job"))
      )
        return;
      await act(button, verb, done);
    });
    return [verb, button];
  };
  const buttons = new Map([
    make("pause", "Pause", "it pauses once its state is saved"),
    make("resume", "Resume", "it goes on"),
    make("cancel", "Cancel", "cancelled"),
  ]);
  const remove = h("button", { type: "button" }, "Delete", h("span", { class: "unseen" }, ` ${jobName(job)}`));
  remove.addEventListener("click", async () => {
    if (!(await sure(`Delete ${jobName(current)}, its log and its curve? Its adapters stay.`, "Delete"))) return;
    await attempt(
      remove,
      place,
      async () => {
        await ask("DELETE", at("/v1/jobs", current.id));
        changed(null);
      },
      "Deleted",
    );
  });
  buttons.set("delete", remove);
  const all = [...buttons.values()];
  const update = (next) => {
    current = next;
    showOnly(
      all,
      [...buttons].filter(([verb]) => CAN[verb].includes(next.state)).map(([, button]) => button),
    );
  };
  update(job);
  return { element: h("div", { class: "buttons" }, all), update };
}

/** The job's state as a word with a colour. */
export function stateBadge(job) {
  const element = h("span", { class: "state" });
  const update = (next) => {
    setText(element, next.state);
    element.dataset.state = next.state;
  };
  update(job);
  return { element, update };
}

/** The job's progress as a bar and in words. */
export function progressOf(job) {
  const bar = h("progress", { "aria-label": `Steps of ${jobName(job)}` });
  const words = h("span", { class: "progress-words" });
  const update = (next) => {
    const { step = 0, steps = next.config?.train?.steps } = next.progress;
    bar.max = steps || 1;
    bar.value = Math.min(step, bar.max);
    setText(words, progressWords(next, step, steps));
  };
  update(job);
  return { element: h("div", { class: "progress" }, bar, words), update };
}

function progressWords(job, step, steps) {
  if (!steps) return job.state === "running" ? "starting" : "not started";
  const parts = [`${number(step)} of ${number(steps)} steps`];
  const waits = job.state === "queued" ? job.waits_s : 0;
  if (job.state === "running" && job.progress.eta_s > 0 && step) parts.push(`${duration(job.progress.eta_s)} left`);
  else if (waits > 0) parts.push(`tried again in ${duration(waits)}`);
  else if (ACTIVE.includes(job.state) && !step) parts.push("starting");
  return parts.join(", ");
}
