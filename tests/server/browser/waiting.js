/** Waiting without a browser: what a view waits with is gone when the wait is over, and ends when the view is left. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

// Without its own imports, which need a page.
const source = readFileSync(new URL("../../../ondevice/server/page/js/api.js", import.meta.url), "utf8");
const alone = source.replaceAll(/^import .*$/gm, "");
const { pause } = await import(`data:text/javascript,${encodeURIComponent(alone)}`);

let listeners = 0;
const left = new AbortController();
const { signal } = left;
const [add, remove] = [signal.addEventListener.bind(signal), signal.removeEventListener.bind(signal)];
signal.addEventListener = (...words) => { listeners += 1; add(...words); };
signal.removeEventListener = (...words) => { listeners -= 1; remove(...words); };
for (let turn = 0; turn < 5; turn += 1) await pause(0.001, signal);
assert.equal(listeners, 0, "a view that stays open collects listeners");
const waiting = pause(60, signal);
left.abort();
await assert.rejects(waiting, { name: "AbortError" });
console.log("{}");
