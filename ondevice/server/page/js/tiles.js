/** A job's figures of this moment. */

import { ENDED } from "./api.js";
import { h, setText } from "./dom.js";
import { bytes, duration, number, percent } from "./format.js";
import { named } from "./live.js";

const NAMES = {
  loss: "Loss",
  evaluation: "Evaluation",
  speed: "Tokens per second",
  step_time: "Time per step",
  eta: "Time left",
  memory: "Memory",
  device: "GPU memory",
  power: "Power",
  heat: "Temperature",
  checkpoint: "Last checkpoint",
};

/** Tiles in a definition list; those that the machine cannot fill say so or are left out. */
export class Tiles {
  machineSeen = false;

  constructor() {
    this.values = {};
    this.notes = {};
    const tile = ([key, name]) => {
      this.values[key] = h("span", { class: "value" }, "–");
      this.notes[key] = h("small", {});
      return h("div", {}, h("dt", {}, name), h("dd", {}, this.values[key], " ", this.notes[key]));
    };
    this.element = h("dl", { class: "tiles" }, Object.entries(NAMES).map(tile));
    this.#put("device", null);
    this.#put("evaluation", null);
  }

  #put(key, value, note = "") {
    setText(this.values[key], value || "–");
    setText(this.notes[key], note);
    this.values[key].closest("div").hidden = value === null;
  }

  /** From the job's progress, and its curve: one step's speed says little. */
  job(job, curve = null) {
    const { progress } = job;
    const ended = ENDED.includes(job.state);
    this.#put(
      "loss",
      number(progress.final_loss ?? progress.loss),
      progress.first_loss === undefined
        ? ""
        : `${progress.final_loss === undefined ? "last step" : "mean of the last tenth"}, from ${number(progress.first_loss)}`,
    );
    const mean = progress.final_loss === undefined ? curve?.smoothed("tokens_per_s")[2].at(-1) : null;
    this.#put("speed", number(mean ?? progress.tokens_per_s, 3), "mean");
    this.#put("step_time", duration(progress.step_time_s));
    this.#put("eta", ended ? null : job.state === "running" ? duration(progress.eta_s) : "–");
    this.#put(
      "checkpoint",
      progress.checkpoint_step === undefined ? "none yet" : `step ${number(progress.checkpoint_step)}`,
    );
    const judged = progress.evaluation;
    this.#put(
      "evaluation",
      judged ? number(judged.loss) : null,
      judged?.accuracy === undefined || judged?.accuracy === null ? "" : `accuracy ${percent(judged.accuracy)}`,
    );
    this.#put("device", progress.peak_device_bytes ? bytes(progress.peak_device_bytes) : null, "highest");
    if (!this.running)
      this.#put("memory", bytes(progress.peak_memory_bytes), progress.peak_memory_bytes ? "highest" : "");
  }

  /** From the machine; `own` is the job's process where it runs. */
  machine(machine, own) {
    this.machineSeen = true;
    this.running = own !== null;
    if (own) this.#put("memory", bytes(own.memory_bytes), `highest ${bytes(own.peak_memory_bytes)}`);
    const watts = Object.entries({ ...machine.power_w, ...named(machine.gpus, "power_w") });
    const heat = Object.entries({ ...machine.temperatures_c, ...named(machine.gpus, "temperature_c") });
    const [rail] = watts.sort((a, b) => b[1] - a[1]);
    const [hottest] = heat.sort((a, b) => b[1] - a[1]);
    this.#put("power", rail ? `${number(rail[1], 3)} W` : "", rail?.[0] ?? "no sensor");
    this.#put("heat", hottest ? `${number(hottest[1], 3)} °C` : "", hottest?.[0] ?? "no sensor");
  }
}
