/** A run's curve as it counts now: what a resumed run does again replaces what was drawn. Pure; tested in Node too. */

const KEPT = 4000;
const FRESH = 500;

/** Steps and evaluations in order. An event's `step` is the step's index; the curve counts steps that are done. */
export class Curve {
  steps = [];
  evaluations = [];

  /** Take an event of the stream, or a point of GET /v1/jobs/ID/metrics; whether the curve has changed. */
  add(event) {
    if (event.event === "start" || event.event === "resume") return this.cut(event.step ?? 0);
    if (event.event === "step") {
      this.#cutList(this.steps, (step) => step.step < event.step);
      this.steps.push(event);
      if (this.steps.length > KEPT) this.#thin();
      return true;
    }
    if (event.event === "evaluate") {
      this.#cutList(this.evaluations, (evaluation) => evaluation.step < event.step);
      this.evaluations.push(event);
      return true;
    }
    return false;
  }

  /** The run goes on at `step`: later steps, and evaluations after them, are done again. */
  cut(step) {
    const steps = this.#cutList(this.steps, (old) => old.step < step);
    const evaluations = this.#cutList(this.evaluations, (old) => old.step <= step);
    return steps || evaluations;
  }

  #cutList(list, stays) {
    let length = list.length;
    while (length > 0 && !stays(list[length - 1])) length -= 1;
    const cut = length < list.length;
    list.length = length;
    return cut;
  }

  /** Every second of the older steps is enough to draw. */
  #thin() {
    const older = this.steps.length - FRESH;
    this.steps = this.steps.filter((_, index) => index >= older || index % 2 === 0);
  }

  /** [steps done, value] columns of a step's field; a value that is no number is a gap. */
  column(field) {
    return [this.steps.map((step) => step.step + 1), this.steps.map((step) => finite(step[field]))];
  }

  /** Steps done, a step's field, and its running mean. */
  smoothed(field) {
    const [x, values] = this.column(field);
    return [x, values, runningMean(values, Math.max(3, Math.round(values.length / 25)))];
  }

  /** Steps done, and a field of the evaluations. */
  judged(field) {
    return [this.evaluations.map((event) => event.step), this.evaluations.map((event) => finite(event[field]))];
  }
}

/** Mean of the last `window` values, gaps left out. */
export function runningMean(values, window) {
  let sum = 0;
  let count = 0;
  return values.map((value, index) => {
    if (value !== null) [sum, count] = [sum + value, count + 1];
    const old = values[index - window];
    if (old !== null && old !== undefined) [sum, count] = [sum - old, count - 1];
    return count ? sum / count : null;
  });
}

function finite(value) {
  return Number.isFinite(value) ? value : null;
}
