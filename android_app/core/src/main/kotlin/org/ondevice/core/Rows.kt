package org.ondevice.core

/** What the keys of a file's rows say they are. */
enum class Format(val formatName: String) {
    CHAT("chat"),
    INSTRUCT("instruct"),
    COMPLETION("completion"),
    TEXT("text"),
    CLASSIFICATION("classification"),
    MULTIPLE_CHOICE("multiple_choice"),
    QA("qa"),
    REGRESSION("regression"),
    THUMBS("thumbs"),
}

/** One row that was left out: [line] counts from 1; [field] is "" when the whole row is at fault. */
data class RowProblem(val file: String, val line: Int, val field: String, val reason: String) {
    override fun toString(): String = if (field.isEmpty()) "$file:$line: $reason" else "$file:$line: '$field': $reason"
}

/** One turn of a conversation; [role] is system, user or assistant. */
data class Turn(val role: String, val content: String)

/**
 * One usable row, as text, before any tokenizer.
 *
 * @property pairs (prompt, answer): one, or one for each candidate of a classification or multiple choice.
 * @property gold index of the right candidate in [pairs]; null where there are no candidates.
 * @property turns a conversation that ends with an assistant turn; instruct rows have both.
 * @property answers every accepted answer of a question answering row.
 * @property label the right label, for counting.
 * @property end whether the end-of-sequence token follows the answer.
 */
data class Row(
    val line: Int,
    val pairs: List<Pair<String, String>> = emptyList(),
    val gold: Int? = null,
    val turns: List<Turn> = emptyList(),
    val answers: List<String> = emptyList(),
    val label: String? = null,
    val end: Boolean = true,
)

/**
 * All rows of one file and every row that was left out.
 *
 * @property duplicates lines that say the same as an earlier line, with that line; they are kept.
 * @property unread columns of the file and keys of turns that nothing reads, with how many rows or turns have them.
 * @property chosen the task itself.
 * @property labels {label key: label text} of classification rows, in the candidates' order.
 */
class Rows(
    val file: String,
    val format: Format,
    val items: List<Row>,
    val problems: List<RowProblem>,
    val task: String? = null,
    val duplicates: List<Pair<Int, Int>> = emptyList(),
    val unread: Map<String, Int> = emptyMap(),
    val chosen: Task? = null,
    val labels: Map<String, String> = emptyMap(),
)

/** Why one row cannot be used; readers turn it into a [RowProblem]. */
internal class BadRow(val field: String, val reason: String, val lengthTokens: Int = 0) : Exception(reason)

/** Texts as the Python side judges them. */
internal object Texts {
    /** What Python's `str.strip` takes for white space. */
    fun isSpace(c: Char): Boolean = c in '\u0009'..'\u000d' || c in '\u001c'..'\u0020' || c == '\u0085' || c == '\u00a0' ||
        c == '\u1680' || c in '\u2000'..'\u200a' || c == '\u2028' || c == '\u2029' || c == '\u202f' || c == '\u205f' || c == '\u3000'

    fun strip(text: String): String = text.trim { isSpace(it) }

    fun isBlank(text: String): Boolean = text.all { isSpace(it) }

    /** [value] as a text that a tokenizer accepts; raises [BadRow] that names the field. */
    fun check(value: Any?, field: String, empty: Boolean = false): String {
        if (value !is String) throw BadRow(field, "expected a text, received ${describe(value)}")
        if (!empty && isBlank(value)) throw BadRow(field, "is empty")
        if ('\u0000' in value) throw BadRow(field, "contains a NUL character")
        if (halfPair(value)) throw BadRow(field, "is not valid UTF-8 (half a surrogate pair)")
        return value
    }

    fun halfPair(text: String): Boolean {
        var index = 0
        while (index < text.length) {
            val c = text[index++]
            if (c.isLowSurrogate()) return true
            if (c.isHighSurrogate()) {
                if (index == text.length || !text[index].isLowSurrogate()) return true
                index++
            }
        }
        return false
    }
}
