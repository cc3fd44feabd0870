package org.ondevice.core

import java.text.Normalizer

/** Unicode normalisation that remembers where every character came from. */
internal class TextNormalizer(private val forms: List<Normalizer.Form>) {
    fun apply(span: Span): Span = forms.fold(span) { text, form -> apply(text, form) }

    private fun apply(span: Span, form: Normalizer.Form): Span {
        if (Normalizer.isNormalized(span.text, form)) return span
        val text = StringBuilder()
        val starts = IntList()
        val ends = IntList()
        for ((from, to) in clusters(span.text)) {
            val part = span.text.substring(from, to)
            val normal = Normalizer.normalize(part, form)
            text.append(normal)
            for (index in normal.indices) {
                val kept = normal == part
                starts.add(span.start(if (kept) from + index else from))
                ends.add(span.end(if (kept) from + index else to - 1))
            }
        }
        val whole = Normalizer.normalize(span.text, form)
        if (text.toString() == whole) return Span(whole, starts.toArray(), ends.toArray())
        val start = span.start(0)
        val end = span.end(span.text.length - 1)
        return Span(whole, IntArray(whole.length) { start }, IntArray(whole.length) { end })
    }

    /** Stretches that normalisation does not join: a base character with its marks, Hangul syllables with their parts. */
    private fun clusters(text: String): List<Pair<Int, Int>> {
        val found = ArrayList<Pair<Int, Int>>()
        var begin = 0
        var index = 0
        while (index < text.length) {
            val point = text.codePointAt(index)
            if (index > begin && !joins(point)) {
                found.add(begin to index)
                begin = index
            }
            index += Character.charCount(point)
        }
        found.add(begin to text.length)
        return found
    }

    private fun joins(point: Int): Boolean = when (Character.getType(point).toByte()) {
        Character.NON_SPACING_MARK, Character.ENCLOSING_MARK, Character.COMBINING_SPACING_MARK -> true
        else -> point in 0x1160..0x11ff
    }
}
