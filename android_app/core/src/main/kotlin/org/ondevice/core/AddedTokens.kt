package org.ondevice.core

/**
 * A token that is found in the text before anything else.
 *
 * @property lstrip, rstrip take the white space on that side with it.
 * @property singleWord only where no word character stands beside it.
 * @property normalized looked for in the normalised text, else in the text as it is.
 */
internal data class AddedToken(
    val id: Int,
    val content: String,
    val special: Boolean,
    val lstrip: Boolean,
    val rstrip: Boolean,
    val singleWord: Boolean,
    val normalized: Boolean,
)

/** A stretch of text, or an added token when [id] is not null. */
internal class Part(val span: Span, val id: Int?)

/** Finds added tokens: leftmost first, of several at one place the longest. */
internal class AddedTokens(tokens: List<AddedToken>, normalizer: TextNormalizer?) {
    private val looked = tokens.map { (if (it.normalized) normalizer?.apply(Span(it.content))?.text else null) ?: it.content }
    private val contents = tokens.indices.associate { tokens[it].id to looked[it] }
    private val byContent = tokens.associateBy { it.content }
    private val raw = Finder(tokens.filter { !it.normalized }.map { it.content to it })
    private val normal = Finder(looked.zip(tokens).filter { it.second.normalized })

    val highestId: Int = tokens.maxOfOrNull { it.id } ?: -1

    fun idOf(content: String): Int? = byContent[content]?.id

    /** What the token decodes to: its text as it is looked for. */
    fun contentOf(id: Int): String? = contents[id]

    /** [span] cut at the tokens that are looked for in text of this kind. */
    fun split(span: Span, normalized: Boolean): List<Part> {
        val finder = if (normalized) normal else raw
        val text = span.text
        if (text.isEmpty()) return emptyList()
        val parts = ArrayList<Part>()
        var done = 0
        var from = 0
        while (true) {
            val (place, length, token) = finder.next(text, from) ?: break
            from = place + length
            var start = place
            var stop = from
            if (token.singleWord && (wordBefore(text, start) || wordAt(text, stop))) continue
            if (token.lstrip) {
                while (start > done && CodePoints.isWhiteSpace(text[start - 1].code)) start--
            }
            if (token.rstrip) {
                while (stop < text.length && CodePoints.isWhiteSpace(text[stop].code)) stop++
            }
            if (start < done) continue
            if (done < start) parts.add(Part(span.sub(done, start), null))
            parts.add(Part(span.sub(start, stop), token.id))
            done = stop
            from = maxOf(from, stop)
        }
        if (done < text.length) parts.add(Part(span.sub(done, text.length), null))
        return parts
    }

    private fun wordBefore(text: String, index: Int) = index > 0 && isWord(text.codePointBefore(index))

    private fun wordAt(text: String, index: Int) = index < text.length && isWord(text.codePointAt(index))

    /** Rust's `\w`. */
    private fun isWord(point: Int): Boolean = when (Character.getType(point).toByte()) {
        Character.NON_SPACING_MARK, Character.ENCLOSING_MARK, Character.COMBINING_SPACING_MARK,
        Character.DECIMAL_DIGIT_NUMBER, Character.CONNECTOR_PUNCTUATION,
        -> true
        else -> Character.isAlphabetic(point) || point == 0x200c || point == 0x200d
    }

    /** Many texts looked for at once, by their first character. */
    private class Finder(patterns: List<Pair<String, AddedToken>>) {
        private val byFirst = patterns.filter { it.first.isNotEmpty() }.groupBy { it.first[0] }
            .mapValues { (_, found) -> found.sortedByDescending { it.first.length } }

        fun next(text: String, from: Int): Triple<Int, Int, AddedToken>? {
            if (byFirst.isEmpty()) return null
            for (place in from until text.length) {
                val candidates = byFirst[text[place]] ?: continue
                val match = candidates.firstOrNull { text.startsWith(it.first, place) } ?: continue
                return Triple(place, match.first.length, match.second)
            }
            return null
        }
    }
}
