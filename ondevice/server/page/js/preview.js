/** Rows as the model sees them: what is trained on, what is only read, how long they are. */

import { at, post } from "./api.js";
import { h, terms } from "./dom.js";
import { rowProblems } from "./errors.js";
import { number } from "./format.js";

/**
 * Ask for a preview and fill `place` with it.
 * @param options model or artifact, task, column, max_length_tokens, train_on_prompt
 * @returns the API's answer
 */
export async function showPreview(place, dataset, options, signal) {
  const asked = Object.fromEntries(
    Object.entries(options).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  place.replaceChildren(h("p", { class: "soft", role: "status" }, "The rows are being read…"));
  try {
    const found = await post(at("/v1/datasets", dataset, "/preview"), asked, signal);
    place.replaceChildren(...previewParts(found));
    return found;
  } catch (error) {
    place.replaceChildren();
    throw error;
  }
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
