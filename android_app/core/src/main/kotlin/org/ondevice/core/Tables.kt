package org.ondevice.core

import java.nio.ByteBuffer
import java.nio.CharBuffer
import java.nio.charset.CodingErrorAction

/**
 * A table of text cells under a header, as `ondevice/data/readers/tables.py` reads it: the separator is the one that
 * splits the header and most first rows alike, and quoting is that of Python's `csv`.
 */
internal class Tables(private val name: String, private val content: ByteArray) {
    private val usual = if (name.lowercase().endsWith(".csv")) ',' else '\t'

    /** Every row with the header's names and its line; rows that cannot be read go to [problems]. */
    fun records(problems: MutableList<RowProblem>): List<Pair<Int, Map<*, *>>> {
        val begin = begin()
        if (begin.size > 1 && begin[0] == '{'.code.toByte() && begin[1] == '"'.code.toByte()) {
            throw dataError("$name holds JSON, not a table", "a header with the columns' names", "{\"", "name it .jsonl")
        }
        val last = begin.lastIndexOf('\n'.code.toByte())
        val separator = separator(decoded(if (last < 0) begin else begin.copyOf(last + 1)), usual)
        var header: List<String>? = null
        val found = ArrayList<Pair<Int, Map<*, *>>>()
        val csv = Csv(decoded(content), separator, strict = true)
        while (true) {
            val line = csv.line + 1
            try {
                val cells = csv.next() ?: break
                val names = header
                when {
                    cells.all { Texts.isBlank(it) } -> continue
                    names == null -> header = header(cells)
                    cells.size != names.size -> throw BadRow("", wrongWidth(cells, names.size, separator))
                    else -> found.add(line to names.zip(cells).filter { it.first.isNotEmpty() }.toMap(LinkedHashMap()))
                }
            } catch (bad: BadRow) {
                problems.add(RowProblem(name, line, bad.field, bad.reason))
            }
        }
        return found
    }

    /** The bytes that decide: white space in front does not count. */
    private fun begin(): ByteArray {
        val part = content.copyOf(minOf(content.size, BEGIN_BYTES))
        val first = part.indexOfFirst { it != 32.toByte() && it !in 9..13 }
        return part.copyOfRange(maxOf(first, 0), part.size)
    }

    private fun header(cells: List<String>): List<String> {
        val names = cells.map { Texts.strip(it) }
        val twice = names.filter { it.isNotEmpty() }.groupingBy { it }.eachCount().filterValues { it > 1 }.keys.sorted()
        if (twice.isNotEmpty()) throw dataError("the header of $name names a column twice: ${twice.joinToString(", ")}", hint = "rename one")
        return names
    }

    private fun wrongWidth(cells: List<String>, expected: Int, separator: Char): String {
        val reason = "expected $expected column${if (expected == 1) "" else "s"} as in the header, received ${cells.size}"
        val line = cells.joinToString(separator.toString())
        for ((other, word) in SEPARATORS) {
            if (other == separator || other !in line || expected < 2) continue
            val split = try {
                Csv(line, other, strict = false).next()
            } catch (_: BadRow) {
                null
            }
            if (split?.size == expected) return "$reason; the row is separated by a $word, the header by a ${SEPARATORS[separator]}"
        }
        return if (cells.size > expected) "$reason; quote a cell that holds a ${SEPARATORS[separator]}" else reason
    }

    companion object {
        private const val BEGIN_BYTES = 1 shl 18
        private const val SAMPLE = 50
        private val SEPARATORS = linkedMapOf(',' to "comma", ';' to "semicolon", '\t' to "tab", '|' to "pipe")
        private val SUFFIXES = listOf(".csv", ".tsv", ".tab")

        /** True if a file of that name is a table and not JSON lines. */
        fun has(name: String): Boolean = SUFFIXES.any { name.lowercase().endsWith(it) }

        /** The separator that splits the header and most of the first rows into equal cells. */
        fun separator(text: String, usual: Char): Char {
            var best = usual
            var most = 0 to false
            for (separator in SEPARATORS.keys) {
                val widths = ArrayList<Int>()
                try {
                    val csv = Csv(text, separator, strict = false)
                    while (widths.size <= SAMPLE) {
                        val cells = csv.next() ?: break
                        if (cells.any { !Texts.isBlank(it) }) widths.add(cells.size)
                    }
                } catch (_: BadRow) {
                    // what was read until then decides
                }
                if (widths.isEmpty() || widths[0] < 2) continue
                val alike = widths.count { it == widths[0] } to (separator == usual)
                if (alike.first > most.first || (alike.first == most.first && alike.second && !most.second)) {
                    best = separator
                    most = alike
                }
            }
            return best
        }

        /** UTF-8 as text; a byte that is none becomes half a surrogate pair, which [Texts.check] reports by field. */
        fun decoded(bytes: ByteArray): String {
            val decoder = Charsets.UTF_8.newDecoder().onMalformedInput(CodingErrorAction.REPORT)
            val input = ByteBuffer.wrap(bytes)
            val output = CharBuffer.allocate(bytes.size + 1)
            while (true) {
                val result = decoder.decode(input, output, true)
                if (!result.isError) break
                repeat(result.length()) { output.put((0xdc00 + (input.get().toInt() and 0xff)).toChar()) }
            }
            (output as java.nio.Buffer).flip() // Android 8 has no flip of a CharBuffer that returns one
            return output.toString()
        }
    }
}

/**
 * Rows of a text by the rules of Python's `csv.reader`: double quotes, which may hold separators and line ends; lines that
 * end with LF, CR or both.
 *
 * @param strict refuse text behind a closing quote, and a quote that is never closed.
 */
internal class Csv(private val text: String, private val separator: Char, private val strict: Boolean) {
    private enum class Place { BEGIN, IN_FIELD, QUOTED, QUOTE_IN_QUOTED, AFTER_LINE_END }

    private var at = 0
    private val cells = ArrayList<String>()
    private val cell = StringBuilder()

    /** Lines read so far. */
    var line = 0
        private set

    /**
     * The cells of the next row, none for an empty line; null at the end.
     *
     * @throws BadRow the row is not CSV; the next one begins with the next line.
     */
    fun next(): List<String>? {
        cells.clear()
        cell.setLength(0)
        var place = Place.BEGIN
        while (at < text.length) {
            val end = lineEnd()
            val isEmpty = cells.isEmpty() && place == Place.BEGIN && text[at] in LINE_ENDS
            line++
            val from = at
            at = end
            if (isEmpty) return emptyList()
            for (index in from until end) place = after(place, text[index])
            when (place) {
                Place.QUOTED -> continue
                Place.AFTER_LINE_END -> Unit
                else -> keep()
            }
            return cells.toList()
        }
        if (place != Place.QUOTED) return null
        if (strict) throw BadRow("", "is not CSV: unexpected end of data")
        keep()
        return cells.toList()
    }

    private fun after(place: Place, c: Char): Place = when (place) {
        Place.BEGIN -> when (c) {
            in LINE_ENDS -> ended()
            '"' -> Place.QUOTED
            separator -> split()
            else -> put(c)
        }
        Place.IN_FIELD -> when (c) {
            in LINE_ENDS -> ended()
            separator -> split()
            else -> put(c)
        }
        Place.QUOTED -> if (c == '"') Place.QUOTE_IN_QUOTED else put(c, Place.QUOTED)
        Place.QUOTE_IN_QUOTED -> when (c) {
            '"' -> put(c, Place.QUOTED)
            separator -> split()
            in LINE_ENDS -> ended()
            else -> if (strict) throw BadRow("", "is not CSV: '$separator' expected after '\"'") else put(c)
        }
        Place.AFTER_LINE_END -> Place.AFTER_LINE_END
    }

    private fun put(c: Char, next: Place = Place.IN_FIELD): Place {
        if (cell.length >= MOST) throw BadRow("", "is not CSV: field larger than field limit ($MOST)")
        cell.append(c)
        return next
    }

    private fun split(): Place {
        keep()
        return Place.BEGIN
    }

    private fun ended(): Place {
        keep()
        return Place.AFTER_LINE_END
    }

    private fun keep() {
        cells.add(cell.toString())
        cell.setLength(0)
    }

    /** Behind the line that begins at [at], with its end. */
    private fun lineEnd(): Int {
        var end = at
        while (end < text.length && text[end] !in LINE_ENDS) end++
        if (end == text.length) return end
        return if (text[end] == '\r' && end + 1 < text.length && text[end + 1] == '\n') end + 2 else end + 1
    }

    private companion object {
        const val LINE_ENDS = "\n\r"
        const val MOST = 131_072
    }
}
