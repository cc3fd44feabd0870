/** Errors of the API as people can act on them. */

import { announce, coded, h, table, terms } from "./dom.js";
import { title } from "./settings.js";

const SHOWN = 100;

/** A box with what happened, what was expected, what was received and what to try. */
export function problemBox(error) {
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("p", { dir: "auto" }, h("strong", {}, coded(inWords(error.message || "an unknown error")))),
    terms([
      ["Expected", text(error.expected)],
      ["Received", text(error.received)],
      ["Try", text(hintOf(error))],
    ]),
    error.problems?.length ? rowProblems(error.problems) : null,
  );
}

/** Bad rows: where they are and what is wrong with them. */
export function rowProblems(problems, caption = "Unusable rows") {
  const rows = problems
    .slice(0, SHOWN)
    .map((problem) => [problem.line ? `Line ${problem.line}` : "Whole file", problem.field || "–", problem.reason]);
  return table(caption, ["Line", "Field", "Reason"], rows);
}

/** An element for errors: `show(error)` replaces the last one, `clear()` removes it. */
export function problemPlace() {
  const element = h("div", { class: "problem-place" });
  return {
    element,
    clear: () => element.replaceChildren(),
    show: (error) => {
      if (error.name === "AbortError" || error.status === 401) return;
      element.replaceChildren(problemBox(error));
      element.scrollIntoView({ block: "nearest" });
    },
  };
}

/** Run `work` with its button out of use; an error goes to `place`, and `done` is announced. */
export async function attempt(button, place, work, done = "") {
  if (button.busy) return undefined;
  button.busy = true;
  button.setAttribute("aria-disabled", "true");
  place.clear();
  try {
    const answer = await work();
    if (done) announce(done);
    return answer;
  } catch (error) {
    if (error.name !== "AbortError" && error.status === undefined) console.error(error);
    place.show(error);
    return undefined;
  } finally {
    button.busy = false;
    button.removeAttribute("aria-disabled");
  }
}

function text(value) {
  if (value === null || value === undefined || value === "") return null;
  return coded(inWords(typeof value === "object" ? JSON.stringify(value) : String(value)));
}

const SETTING = /[`']?\b(?:train|data|method|model|limits)\.(?:[a-z-]+\.)?([a-z][a-z_]+)\b[`']?/g;
const LABELS = { task: "Prompt template", memory_bytes: "Memory limit", name: "Method", columns: "column" };

/** What the API says of its fields, in the words of this page's forms. */
export function inWords(text) {
  return text
    .replace(SETTING, (_, key) => `“${LABELS[key] ?? title(key)}”`)
    .replace(/`?\bskip_bad_rows\b`?/g, "“Skip unusable rows”")
    .replace(/`force`/g, "“Start even if”");
}

/** A hint without the parts that only a program can follow. */
function hintOf(error) {
  const parts = (error.hint ?? error.try ?? "").split("; ");
  return parts.filter((part) => !/\b(GET|PUT|POST|DELETE) \/|docs\/|\.yaml/.test(part)).join("; ");
}
