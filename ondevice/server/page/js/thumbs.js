/** Ratings of replies, thumbs up or down, and their list. */

import { ask, at, get, keyed, post } from "./api.js";
import { announce, h, table } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";
import { trainOffer } from "./judged.js";

const UP = "\u{1F44D}";
const DOWN = "\u{1F44E}";
const WORDS = { true: "Thumbs up", false: "Thumbs down" };

/**
 * Two buttons for a reply; a second press removes the rating.
 * @param row prompt, answer, model and adapter, as POST /v1/thumbs takes them
 * @param whose whose reply it is, for a screen reader
 */
export function thumbButtons(row, whose, changed) {
  const place = problemPlace();
  let kept = null;
  let before = Promise.resolve(); // one click after the other: the last one decides, however late a response comes
  const buttons = [true, false].map((liked) => {
    const button = h(
      "button",
      { type: "button", class: "thumb", "aria-pressed": "false" },
      h("span", { "aria-hidden": "true" }, liked ? UP : DOWN),
      h("span", { class: "unseen" }, `${WORDS[liked]}: ${whose}`),
    );
    const toggle = async () => {
      if (kept?.liked === liked) {
        await ask("DELETE", at("/v1/thumbs", kept.id));
        kept = null;
      } else kept = await post("/v1/thumbs", { ...row, liked });
      buttons.forEach((one, index) => one.setAttribute("aria-pressed", String(kept?.liked === (index === 0))));
      announce(kept ? `${WORDS[liked]} saved` : "Rating removed");
      await changed();
    };
    button.addEventListener("click", () => {
      before = before.then(() => attempt(button, place, toggle));
    });
    return button;
  });
  return h("div", { class: "buttons" }, buttons, place.element);
}

/** The ratings: their number, the newest ones, and all of them as a file. */
export function thumbsPanel(signal) {
  const [list, place] = [h("div"), problemPlace()];
  const changed = async () => {
    const rows = await get("/v1/thumbs?limit=20", signal);
    const counts = await get("/v1/thumbs/counts", signal);
    list.replaceChildren(
      ...(rows.length
        ? [
            trainOffer(counts, rows[0].model, signal),
            h("a", { class: "button", href: keyed("/v1/thumbs/export"), download: "thumbs.jsonl" }, "Download as JSON lines"),
            table(
              "The newest",
              ["Reply", "Prompt", "Rating", "Model", "Actions"],
              rows.map((row) => [
                h("span", { class: "answer" }, row.answer),
                typeof row.prompt === "string" ? row.prompt : row.prompt.at(-1).content,
                h("span", { title: WORDS[row.liked] }, row.liked ? UP : DOWN),
                row.adapter ? `${row.model} with ${row.adapter}` : row.model,
                remove(row),
              ]),
            ),
          ]
        : [h("p", {}, "No ratings yet.")]),
    );
  };
  const remove = (row) => {
    const button = h("button", { type: "button" }, "Forget", h("span", { class: "unseen" }, ` ${row.answer}`));
    button.addEventListener("click", () =>
      attempt(button, place, async () => {
        await ask("DELETE", at("/v1/thumbs", row.id));
        await changed();
      }),
    );
    return button;
  };
  const element = h("details", { class: "panel" }, h("summary", {}, "Judged answers"), place.element, list);
  element.addEventListener("toggle", () => element.open && attempt(element, place, changed));
  return { element, changed: () => (element.open ? changed() : undefined) };
}
