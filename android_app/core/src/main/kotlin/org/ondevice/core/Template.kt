package org.ondevice.core

import java.math.BigDecimal
import kotlin.math.abs

/**
 * A template of one's own, after `ondevice/data/tasks/custom.py`. An artifact brings it as JSON, in which every scalar
 * is a text.
 */
internal class Template private constructor(values: Map<*, *>, private val file: String) {
    private val prompt = text(values, "prompt") ?: throw wrong("prompt", "a text with {column} in it", values["prompt"])
    private val name = text(values, "name")
    private val fields = (values["fields"] as? Map<*, *> ?: emptyMap<Any, Any>()).entries.associate { (key, columns) -> "$key" to texts(columns, "fields.$key") }
    private val label = if (values.containsKey("label")) texts(values["label"], "label") else listOf("label")
    private val choices: Map<String, String>?
    private val words: List<String>?

    /** The placeholder of the column that holds the candidates of each row. */
    private val column: String?
    private val labels = text(values, "labels")
    private val metric: String

    init {
        val unknown = values.keys.firstOrNull { it !in KEYS }
        if (unknown != null) throw wrong("$unknown", "the keys ${KEYS.joinToString(", ")}", values[unknown])
        val candidates = values["candidates"]
        choices = (candidates as? Map<*, *>)?.entries?.associate { (key, value) -> "$key" to (value as? String ?: throw wrong("candidates.$key", "a text", value)) }
        words = choices?.values?.toList() ?: (candidates as? List<*>)?.let { texts(it, "candidates") }
        column = (candidates as? String)?.let { text -> PLACEHOLDER.matchEntire(text.trim())?.groupValues?.get(1)?.let(Texts::strip) ?: throw wrong("candidates", "{choices}", text) }
        metric = text(values, "metric") ?: if (candidates == null) "" else "accuracy"
    }

    private val isFree = words == null && column == null
    private val kind = when {
        isFree -> if (metric in GENERATED) Format.QA else Format.COMPLETION
        metric in RANKED -> Format.REGRESSION
        column != null || words!!.any { names(it).isNotEmpty() } -> Format.MULTIPLE_CHOICE
        else -> Format.CLASSIFICATION
    }
    private val numbers = if (kind == Format.REGRESSION) choices.orEmpty().keys.map { number(it) ?: throw wrong("candidates", "labels that are numbers", it) } else emptyList()

    private fun task(fallback: String): Task {
        val used = names(prompt) + listOfNotNull(column) + words.orEmpty().flatMap(::names)
        return Task(
            name ?: fallback, kind, used.distinct().associateWith { fields[it] ?: listOf(it) }, emptyList(), prompt, label,
            own = ::render, placeholder = choices?.keys?.first() ?: if (isFree) "" else "0", list = column, reads = listOfNotNull(labels?.trim('{', '}', ' ')),
        )
    }

    private fun render(task: Task, row: Map<*, *>): Rendered {
        fun filled(text: String) = PLACEHOLDER.replace(text) { match ->
            val field = Texts.strip(match.groupValues[1])
            shown(Task.column(row, task.columns.getValue(field)), match.groupValues[1])
        }
        val asked = filled(prompt).trimEnd(' ')
        val value = Task.column(row, label)
        if (isFree) {
            val answers = Task.answersOf(if (value is Number || value is Boolean) pythonText(value) else value, label[0])
            val text = after(asked, answers[0])
            return if (kind == Format.QA) Rendered(listOf(asked to text + "\n"), answers = answers) else Rendered(listOf(asked to text))
        }
        val texts = if (column != null) Task.answersOf(list(Task.column(row, task.columns.getValue(column))), column) else words!!.map { Texts.strip(filled(it)) }
        val gold = gold(task, value, texts, row)
        val shown = if (kind == Format.CLASSIFICATION || kind == Format.REGRESSION) texts[gold] else letter(gold)
        val distinct = texts.distinct()
        if (distinct.size < 2) throw BadRow("", "its candidates are all '${texts[0]}'")
        return Rendered(distinct.map { asked to after(asked, it) }, distinct.indexOf(texts[gold]), label = shown)
    }

    private fun gold(task: Task, value: Any, texts: List<String>, row: Map<*, *>): Int {
        if (numbers.isNotEmpty()) {
            val number = number(value) ?: throw BadRow(label[0], "expected a number, received ${describe(value)}")
            return numbers.indices.minByOrNull { abs(numbers[it] - number) }!!
        }
        val known = when {
            labels != null -> list(Task.column(row, listOf(labels.trim('{', '}', ' ')))).let { it as? List<*> ?: "$it".map { c -> "$c" } }.map { pythonText(it) ?: "$it" }
            choices != null -> choices.keys.toList()
            else -> return RowConverter.choiceIndex(value, texts)
        }
        val key = RowConverter.labelKey(value)
        val index = if (key == null) -1 else known.map { RowConverter.labelKey(it) }.indexOf(key)
        if (index < 0 || index >= texts.size) throw BadRow(label[0], "expected a label of ${task.name}: ${known.joinToString(", ")}; received ${describe(value)}")
        return index
    }

    private fun text(values: Map<*, *>, key: String): String? {
        val value = values[key] ?: return null
        return (value as? String)?.takeIf { it.isNotEmpty() } ?: throw wrong(key, "a text", value)
    }

    private fun texts(value: Any?, key: String): List<String> {
        val items = if (value is String) listOf(value) else value as? List<*>
        if (items.isNullOrEmpty() || items.any { it !is String }) throw wrong(key, "a text, or several", value)
        return items.map { it as String }
    }

    private fun wrong(key: String, expected: String, value: Any?) = artifactError("$file: the template's '$key'", expected, describe(value), "export the model again")

    companion object {
        private val PLACEHOLDER = Regex("""\{([^{}\n]*)\}""")
        private val KEYS = setOf("prompt", "name", "fields", "label", "candidates", "labels", "metric")
        private val RANKED = setOf("pearson", "spearman")
        private val GENERATED = setOf("f1", "exact_match")
        private val NUMBER = Regex("""[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?""")

        /**
         * The task of a template's JSON text.
         *
         * @param name if the template has none itself.
         * @param file where it was read, for messages.
         * @throws OndeviceException [ErrorKind.ARTIFACT]: it is not JSON, or not a template.
         */
        fun task(text: String, name: String, file: String): Task {
            val values = try {
                Json.parse(text)
            } catch (error: JsonException) {
                throw artifactError("$file: the template is not JSON", "a template as `ondevice export` writes it", error.message, "export the model again with --task")
            }
            return Template(values as? Map<*, *> ?: throw artifactError("$file: the template is not an object", received = describe(values)), file).task(name)
        }

        private fun names(text: String) = PLACEHOLDER.findAll(text).map { Texts.strip(it.groupValues[1]) }.distinct().toList()

        /** A text after a space, unless the prompt is empty or ends its line. */
        private fun after(prompt: String, text: String) = if (prompt.isEmpty() || Texts.isSpace(prompt.last())) text else " $text"

        /** A field for the prompt: a text, a number, or a list as lines A., B., ... */
        private fun shown(value: Any, name: String): String {
            if (value is List<*> || value is Map<*, *>) {
                return Task.answersOf(value, name).withIndex().joinToString("\n") { (index, text) -> "${'A' + index}. $text" }
            }
            return Texts.strip(Texts.check(if (value is Number || value is Boolean) pythonText(value) else value, name))
        }

        /** A list, which a cell of a table holds as JSON. */
        private fun list(value: Any): Any {
            if (value !is String || value.trimStart { Texts.isSpace(it) }.firstOrNull() !in listOf('[', '{')) return value
            return try {
                Json.parse(value) ?: value
            } catch (_: JsonException) {
                value
            }
        }

        private fun letter(index: Int) = if (index < 26) ('A' + index).toString() else index.toString()

        private fun number(value: Any): Double? = when (value) {
            is Boolean -> null
            is Number -> value.toDouble().takeIf { it.isFinite() }
            is String -> Texts.strip(value).takeIf { NUMBER.matches(it) }?.toDouble()?.takeIf { it.isFinite() }
            else -> null
        }

        /** A boolean or a number as Python's `str` shows it; null for another value. */
        fun pythonText(value: Any?): String? = when (value) {
            is String -> value
            is Boolean -> if (value) "True" else "False"
            is Double -> pythonFloat(value)
            is Number -> value.toString()
            null -> "None"
            else -> null
        }

        private fun pythonFloat(value: Double): String {
            if (value.isNaN()) return "nan"
            if (value.isInfinite()) return if (value > 0) "inf" else "-inf"
            if (value == 0.0) return if (1 / value < 0) "-0.0" else "0.0"
            val exact = BigDecimal(value.toString()).stripTrailingZeros()
            val digits = exact.unscaledValue().abs().toString()
            val exponent = digits.length - exact.scale() - 1
            val sign = if (value < 0) "-" else ""
            if (exponent in -4..15) return exact.toPlainString().let { if ('.' in it) it else "$it.0" }
            val rest = if (digits.length > 1) "." + digits.substring(1) else ""
            return "$sign${digits[0]}${rest}e${if (exponent < 0) "-" else "+"}${abs(exponent).toString().padStart(2, '0')}"
        }
    }
}
