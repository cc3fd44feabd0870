package org.ondevice.core

/** A stretch of a decoded example; [trained] tells whether its tokens are labelled. */
data class Segment(val text: String, val trained: Boolean)

/**
 * A data file at a glance, lengths in tokens (what truncation dropped included).
 *
 * @property rows rows of the file, good and bad.
 * @property longestTokens the longest row before truncation.
 * @property examples the first rows decoded, in stretches of equally trained tokens.
 * @property labels how often each label occurs.
 * @property unread columns and keys that nothing reads, with how many rows or turns have them.
 */
class Preview(
    val file: String,
    val format: Format,
    val task: String?,
    val template: String,
    val rows: Int,
    val sequences: Int,
    val maxLengthTokens: Int,
    val truncated: Int,
    val tooLong: Int,
    val longestTokens: Int,
    val medianTokens: Int,
    val trainedTokens: Int,
    val labels: Map<String, Int>,
    val examples: List<List<Segment>>,
    val problems: List<RowProblem>,
    val duplicates: List<Pair<Int, Int>>,
    val unread: Map<String, Int> = emptyMap(),
) {
    companion object {
        /** Summarise rows that were read and encoded; [examples] is the number to decode. */
        fun of(rows: Rows, dataset: Dataset, tokenizer: Tokenizer, examples: Int = 3): Preview {
            val lengths = dataset.items.map { it.example.size + it.droppedTokens }.sorted()
            return Preview(
                file = rows.file,
                format = rows.format,
                task = rows.task,
                template = dataset.template,
                rows = rows.items.size + rows.problems.size,
                sequences = dataset.items.size,
                maxLengthTokens = dataset.maxLengthTokens,
                truncated = dataset.truncated,
                tooLong = dataset.tooLong,
                longestTokens = lengths.lastOrNull() ?: 0,
                medianTokens = if (lengths.isEmpty()) 0 else lengths[lengths.size / 2],
                trainedTokens = dataset.items.sumOf { it.example.trainedTokens },
                labels = rows.items.mapNotNull { it.label }.groupingBy { it }.eachCount(),
                examples = dataset.items.take(examples).map { segments(it.example, tokenizer) },
                problems = dataset.problems,
                duplicates = rows.duplicates,
                unread = rows.unread,
            )
        }

        /** The example decoded, special tokens included, in stretches of equally trained tokens. */
        fun segments(example: Example, tokenizer: Tokenizer): List<Segment> {
            val found = ArrayList<Segment>()
            var begin = 0
            var shown = ""
            for (end in 1..example.size) {
                val flag = example.labels[begin] != IGNORE
                if (end == example.size || (example.labels[end] != IGNORE) != flag) {
                    val text = tokenizer.decode(example.ids.copyOf(end), skipSpecialTokens = false)
                    if (!text.startsWith(shown)) shown = shown.trimEnd('\uFFFD') // a character whose bytes lie on both sides
                    found.add(Segment(text.substring(minOf(shown.length, text.length)), flag))
                    begin = end
                    shown = text
                }
            }
            return found
        }
    }
}
