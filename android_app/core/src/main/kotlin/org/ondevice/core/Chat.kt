package org.ondevice.core

/** A conversation as token ids; [trained] marks the assistant's turns, [start] is the first token of the last one. */
internal class RenderedChat(val ids: IntArray, val trained: BooleanArray, val start: Int)

/**
 * Conversations in the ChatML form, which the templates of SmolLM2, Qwen 2 and Qwen 2.5 render:
 * `<|im_start|>role\ncontent<|im_end|>\n`. The template itself is Jinja; one that is not word for word of a known
 * form is refused, because a guess would train on another text than the model was made for.
 *
 * @property defaultSystem the system turn that the template puts in front when there is none; null for no such turn.
 */
class ChatTemplate private constructor(val defaultSystem: String?) {
    /** The conversation as text; [ask] adds the head of the answer that the assistant is to give. */
    fun render(turns: List<Turn>, ask: Boolean): String {
        val text = StringBuilder()
        if (defaultSystem != null && turns.firstOrNull()?.role != "system") text.append("${START}system\n$defaultSystem$END\n")
        for (turn in turns) text.append("$START${turn.role}\n${turn.content}$END\n")
        if (ask) text.append("${START}assistant\n")
        return text.toString()
    }

    /** Ids of a conversation that ends with an assistant turn, as `ondevice/data/tasks/chat.py` gives them. */
    internal fun encode(tokenizer: Tokenizer, turns: List<Turn>): RenderedChat {
        val whole = render(turns, false)
        val spans = turns.indices.filter { turns[it].role == "assistant" }.map { index ->
            val before = render(turns.subList(0, index), true)
            val after = render(turns.subList(0, index + 1), false)
            before.length to after.trimEnd { Texts.isSpace(it) }.length
        }
        val encoded = tokenizer.encodeWithOffsets(whole)
        val covers = { token: Int, span: Pair<Int, Int> ->
            encoded.starts[token] < span.second && maxOf(encoded.ends[token], encoded.starts[token] + 1) > span.first
        }
        val last = encoded.ids.indices.filter { covers(it, spans.last()) }
        if (last.isEmpty()) throw BadRow("messages", "the tokenizer's chat template drops the last assistant turn")
        val end = last.last() + 1
        val trained = BooleanArray(end) { token -> spans.any { covers(token, it) } }
        return RenderedChat(encoded.ids.copyOf(end), trained, last.first())
    }

    companion object {
        private const val START = "<|im_start|>"
        /** Behind every turn. */
        internal const val END = "<|im_end|>"
        private const val BREAK = """(?:\n|\\n)"""
        private const val HEAD = """\{\{-? '<\|im_start\|>system$BREAK([^'\\\{\}]*)<\|im_end\|>$BREAK' \}\}"""
        private const val TURN = """\{\{'<\|im_start\|>' \+ message\['role'\] \+ '$BREAK' \+ message\['content'\] \+ '<\|im_end\|>' \+ '$BREAK'\}\}"""
        private const val ASK = """\{%-? if add_generation_prompt %\}\s*\{\{-? '<\|im_start\|>assistant$BREAK' \}\}\s*\{%-? endif %\}"""

        /** Every brace is escaped, for Android's engine takes a bare one for a mistake. */
        private val FORMS = listOf(
            // plain ChatML
            Regex(
                """\{% for message in messages %\}<\|im_start\|>\{\{ message\['role'\] \}\}\n\{\{ message\['content'\] \}\}<\|im_end\|>\n""" +
                    """\{% endfor %\}\{% if add_generation_prompt %\}<\|im_start\|>assistant\n\{% endif %\}""",
            ),
            Regex("""\{% for message in messages %\}$TURN\{% endfor %\}$ASK"""),
            // SmolLM2, Qwen 2: a default system turn
            Regex(
                """\{% for message in messages %\}\{% if loop\.first and messages\[0\]\['role'\] != 'system' %\}$HEAD""" +
                    """\{% endif %\}$TURN\{% endfor %\}$ASK""",
            ),
            // Qwen 2.5: the branches for tools, which rows never have, may say anything
            Regex(
                """\{%- if tools %\}(?s:.*?)\{%- else %\}\s*\{%- if messages\[0\]\['role'\] == 'system' %\}\s*""" +
                    """\{\{- '<\|im_start\|>system\\n' \+ messages\[0\]\['content'\] \+ '<\|im_end\|>\\n' \}\}\s*""" +
                    """(?:\{%- else %\}\s*$HEAD\s*)?\{%- endif %\}\s*\{%- endif %\}\s*\{%- for message in messages %\}\s*""" +
                    """\{%- if \(message\.role == "user"\) or \(message\.role == "system" and not loop\.first\) """ +
                    """or \(message\.role == "assistant" and not message\.tool_calls\) %\}\s*""" +
                    """\{\{- '<\|im_start\|>' \+ message\.role \+ '\\n' \+ message\.content \+ '<\|im_end\|>' \+ '\\n' \}\}\s*""" +
                    """\{%- elif message\.role == "assistant" %\}(?s:.*)\{%- endif %\}\s*\{%- endfor %\}\s*$ASK""",
            ),
        )

        /**
         * The form of a template.
         *
         * @throws OndeviceException [ErrorKind.DATA] for a template that is none of the known ones.
         */
        fun of(template: String): ChatTemplate {
            for (form in FORMS) {
                val match = form.matchEntire(template.trim()) ?: continue
                return ChatTemplate(match.groupValues.getOrNull(1)?.ifEmpty { null })
            }
            throw dataError(
                "the model's chat template is not one that the app can render",
                "ChatML, as SmolLM2, Qwen 2 and Qwen 2.5 have it", template.take(80) + if (template.length > 80) "..." else "",
                "write the rows as prompt and completion",
            )
        }
    }
}
