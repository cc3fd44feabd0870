package org.ondevice.core

import java.io.File

/**
 * One thing that a task asks for.
 *
 * @property name as the rows call it.
 * @property isList one candidate a line.
 * @property isOptional may be empty.
 */
class TaskField(val name: String, val isList: Boolean = false, val isOptional: Boolean = false)

/**
 * What an adapter or an artifact was trained to do: `ondevice_task.json`, as `ondevice/data/tasks/trained.py` writes it. It
 * tells how a text becomes a prompt and what ends an answer, so that the app asks as was trained.
 *
 * @property labels {label key: label text} of rows with classes, in the candidates' order.
 * @property framing what makes the prompt: "chat template", "instruction prompt", a task's name, or "".
 * @property chatTemplate of the training, where it frames the prompt.
 * @property ends special tokens that were trained as the end of an answer.
 * @property maxLengthTokens longest sequence of the training, 0 where it is not known.
 */
class TaskRecord private constructor(
    val format: Format,
    val task: Task?,
    private val template: String?,
    private val columns: Map<String, String>,
    val labels: Map<String, String>,
    val framing: String,
    val chatTemplate: String?,
    val ends: List<String>,
    val maxLengthTokens: Int,
    val longestAnswerTokens: Int,
    private val rest: Map<String, Any?> = emptyMap(),
) {
    /** True if an answer is one of several texts, and not written. */
    val hasCandidates: Boolean get() = format == Format.CLASSIFICATION || format == Format.MULTIPLE_CHOICE || format == Format.REGRESSION

    /** What a text to answer needs, in the order of the prompt. */
    val fields: List<TaskField> = when {
        task != null -> task.columns.map { (name, keys) -> TaskField(keys[0], isList = name == task.list) }
        format == Format.CLASSIFICATION || format == Format.TEXT -> listOf(TaskField("text"))
        format == Format.MULTIPLE_CHOICE -> listOf(TaskField("question"), TaskField("choices", isList = true))
        format == Format.INSTRUCT -> listOf(TaskField("instruction"), TaskField("input", isOptional = true))
        else -> listOf(TaskField("prompt"))
    }

    /** The candidates that every text has; empty where a row brings its own, or the answer is written. */
    val answers: List<String> get() = when {
        task != null && format == Format.CLASSIFICATION -> try {
            task.render(task.columns.values.associate { it[0] to "x" } + (task.labels[0] to task.placeholder)).pairs.map { Texts.strip(it.second) }
        } catch (_: BadRow) {
            emptyList()
        }
        else -> labels.values.toList()
    }

    /**
     * Rows of a file as this task has them.
     *
     * @param name of the file.
     * @throws OndeviceException as [RowReader.read].
     */
    fun read(name: String, bytes: ByteArray): Rows = RowReader.read(name, bytes, task, columns, allowEmpty = false)

    /**
     * The texts of [fields] as a row without an answer: a placeholder stands for it.
     *
     * @throws OndeviceException [ErrorKind.DATA]: a field is empty.
     */
    internal fun rows(values: Map<String, String>): Rows {
        val texts: Map<String, Any?> = fields.associate { field ->
            val text = values[field.name] ?: ""
            field.name to if (field.isList) text.lines().map { Texts.strip(it) }.filter { it.isNotEmpty() } else text
        }
        val record: Map<String, Any?> = when {
            task != null -> texts + (task.labels[0] to task.placeholder.ifEmpty { ANSWER })
            format == Format.CLASSIFICATION -> texts + ("label" to labels.keys.first())
            format == Format.MULTIPLE_CHOICE -> texts + ("answer" to 0L)
            format == Format.INSTRUCT -> texts.filterValues { it != "" } + ("output" to ANSWER)
            format == Format.CHAT -> mapOf("messages" to listOf(turn("user", texts["prompt"]), turn("assistant", ANSWER)))
            format == Format.THUMBS -> texts + mapOf("answer" to ANSWER, "liked" to true)
            else -> texts + ("completion" to ANSWER)
        }
        val row = try {
            RowConverter(format, task, listOf(record), labels).row(1, record)
        } catch (bad: BadRow) {
            throw dataError("'${bad.field}' ${bad.reason}", hint = "fill in the field")
        }
        return Rows("the prompt", format, listOf(row), emptyList(), task?.name, chosen = task, labels = labels)
    }

    private fun turn(role: String, content: Any?) = mapOf("role" to role, "content" to content)

    /** The content of `ondevice_task.json`. */
    fun toText(): String {
        val values = linkedMapOf<String, Any?>("format" to format.formatName, "task" to task?.name, "template" to template)
        values += linkedMapOf("columns" to columns.ifEmpty { null }, "labels" to labels.ifEmpty { null }, "framing" to framing.ifEmpty { null })
        values += linkedMapOf("chat_template" to chatTemplate, "ends" to ends.ifEmpty { null })
        values += linkedMapOf("max_length_tokens" to maxLengthTokens.takeIf { it > 0 }, "longest_answer_tokens" to longestAnswerTokens.takeIf { it > 0 })
        return Json.write(rest + values.filterValues { it != null } + ("version" to VERSION), "  ") + "\n"
    }

    companion object {
        const val FILE_NAME = "ondevice_task.json"
        private const val VERSION = 1L

        /** Stands for the answer of a text; no tokenizer joins it to what is before it. */
        private const val ANSWER = "\u2603"

        /** Fields of the file that the app keeps as they are. */
        private val KEPT = setOf("ondevice", "date", "evaluation", "base_model")

        /** The record in a folder; null where there is none, or its rows are ones that the app does not read. */
        fun read(folder: File): TaskRecord? {
            val file = File(folder, FILE_NAME)
            return if (file.isFile) parse(Storage.readText(file), FILE_NAME) else null
        }

        /** @throws OndeviceException [ErrorKind.ARTIFACT]: it is damaged, or of a newer version. */
        fun parse(text: String, file: String): TaskRecord? {
            val top = Fields.parse(text, file)
            if (top.raw("version") != VERSION) throw top.wrong("version", "$VERSION", top.raw("version"))
            val name = top.text("format")
            val format = Format.entries.firstOrNull { it.formatName == name } ?: return null
            val template = top.textOrNull("template")
            val named = top.textOrNull("task")
            val task = if (template != null) Template.task(template, named ?: "template", file) else named?.let(Tasks::find)
            val labels = texts(top, "labels")
            if (format == Format.CLASSIFICATION && task == null && labels.isEmpty()) throw top.wrong("labels", "the label texts", null)
            val chat = top.raw("chat_template").let { if (it is Map<*, *>) it["default"] else it } as? String
            return TaskRecord(
                task?.kind ?: format, task, template, texts(top, "columns"), labels, top.textOrNull("framing") ?: "", chat,
                if (top.has("ends")) top.texts("ends") else emptyList(), number(top, "max_length_tokens"), number(top, "longest_answer_tokens"),
                KEPT.filter(top::has).associateWith(top::raw),
            )
        }

        /** The record of a task of [Tasks]; what an artifact's manifest names. */
        fun of(task: Task): TaskRecord = TaskRecord(task.kind, task, null, emptyMap(), emptyMap(), task.name, null, emptyList(), 0, 0)

        /**
         * What a run on [rows] trains.
         *
         * @param artifact the record of the artifact, for the text of its template and the model.
         */
        fun of(rows: Rows, dataset: Dataset, tokenizer: Tokenizer, artifact: TaskRecord?): TaskRecord {
            val same = artifact?.takeIf { it.task != null && it.task.name == rows.task && it.task.isOwn == rows.chosen?.isOwn }
            val isChat = dataset.template == "chat template"
            return TaskRecord(
                rows.format, rows.chosen, same?.template, same?.columns ?: emptyMap(), rows.labels, dataset.template,
                if (isChat) tokenizer.chatTemplate else null, ends(rows, tokenizer, isChat), dataset.maxLengthTokens,
                dataset.items.maxOfOrNull { it.example.trainedTokens } ?: 0, artifact?.rest ?: emptyMap(),
            )
        }

        private fun ends(rows: Rows, tokenizer: Tokenizer, isChat: Boolean): List<String> = when {
            isChat -> listOf(ChatTemplate.END)
            rows.items.any { it.end } -> listOfNotNull(tokenizer.eosToken)
            else -> emptyList()
        }

        private fun texts(top: Fields, name: String): Map<String, String> =
            if (!top.has(name)) emptyMap() else top.map(name).mapValues { (key, value) -> value as? String ?: throw top.wrong("$name.$key", "a text", value) }

        private fun number(top: Fields, name: String): Int = if (top.has(name)) top.int(name) else 0
    }
}
