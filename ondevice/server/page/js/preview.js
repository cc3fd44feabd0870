/** Rows as the model sees them: what is trained on, what is only read, how long they are. */

import { post } from "./api.js";
import { h, terms } from "./dom.js";
import { problemPlace, rowProblems } from "./errors.js";
import { number } from "./format.js";

/**
 * Ask for a preview and fill `place` with it.
 * @param base the path of a data set, or of an upload that has arrived
 * @param options model or artifact, task, columns, max_length_tokens, train_on_prompt
 * @returns the API's answer
 */
export async function showPreview(place, base, { columns = {}, ...options }, signal) {
  const column = Object.entries(columns).map((pair) => pair.join("="));
  const asked = Object.fromEntries(
    Object.entries({ ...options, column }).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  place.replaceChildren(h("p", { class: "soft", role: "status" }, "The rows are being read…"));
  try {
    const found = await post(`${base}/preview`, asked, signal);
    place.replaceChildren(...previewParts(found));
    return found;
  } catch (error) {
    place.replaceChildren();
    throw error;
  }
}

const LATER_MS = 500;

/**
 * A preview that follows its form: `later()` reads the rows anew once the user has stopped to change it.
 * @param ask gives `[base, options]`, or null while there is nothing to show
 */
export function livePreview(ask, signal) {
  const [place, shown] = [problemPlace(), h("div", { class: "preview" })];
  let waiting = null;
  let running = new AbortController();
  signal.addEventListener("abort", () => {
    clearTimeout(waiting);
    running.abort();
  });
  const show = async () => {
    const asked = ask();
    running.abort();
    running = new AbortController();
    place.clear();
    if (!asked) {
      shown.replaceChildren();
      return;
    }
    await showPreview(shown, ...asked, running.signal);
  };
  return {
    element: h("div", {}, place.element, shown),
    place,
    show,
    later: () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => show().catch((error) => place.show(error)), LATER_MS);
    },
    clear: () => {
      clearTimeout(waiting);
      running.abort();
      place.clear();
      shown.replaceChildren();
    },
  };
}

function previewParts(found) {
  const lengths = found.lengths_tokens;
  const labels = counted(found.labels);
  return [
    terms(
      [
        ["Rows", number(found.rows)],
        ["Read as", found.notes.join("; ") || null],
        ["Format", found.task ? `${found.format}, template ${found.task}` : found.format],
        [
          "Tokens per row",
          `half up to ${number(lengths.p50)}, 95% up to ${number(lengths.p95)}, the longest ${number(lengths.max)}`,
        ],
        ["Trained tokens", number(found.trained_tokens)],
        ["Unread columns", counted(found.unread) || null],
        ["Labels", labels],
        ["Rows cut to the length", found.truncated ? number(found.truncated) : null],
        ["Rows skipped, too long", found.too_long ? number(found.too_long) : null],
        [
          "Suggested length",
          found.suggested_max_length_tokens ? `${number(found.suggested_max_length_tokens)} tokens` : null,
        ],
      ],
      "terms compact",
    ),
    h("p", { class: "legend" }, h("mark", {}, "trained on"), " ", h("span", { class: "masked" }, "only read (masked)")),
    h(
      "ol",
      { class: "examples" },
      found.examples.map((segments, index) =>
        h(
          "li",
          {},
          found.example_names[index] ? h("strong", {}, found.example_names[index]) : null,
          ...found.example_images[index].map(picture),
          h("p", { class: "example", dir: "auto" }, segments.map(piece)),
          found.example_unread[index]?.length
            ? h("p", { class: "soft" }, `Not read: ${found.example_unread[index].join(", ")}`)
            : null,
        ),
      ),
    ),
    found.problems.length ? rowProblems(found.problems) : null,
  ].filter(Boolean);
}

/** A picture of a row, small, with its size and tokens. */
function picture({ name, width, height, tokens, png }) {
  const words = `${name || "bytes of the row"}, ${width} × ${height}, ${number(tokens)} tokens`;
  const image = h("img", { src: `data:image/png;base64,${png}`, alt: name || "a picture of the row" });
  return h("figure", { class: "picture" }, h("figcaption", { class: "soft" }, words), image);
}

function counted(counts) {
  return Object.entries(counts ?? {})
    .map(([name, count]) => `${name}: ${number(count)}`)
    .join(", ");
}

/** A screen reader hears where the trained part begins and ends. */
function piece({ text, trained }) {
  if (!trained) return h("span", { class: "masked" }, text);
  return h("mark", {}, h("span", { class: "unseen" }, " [trained: "), text, h("span", { class: "unseen" }, "] "));
}
