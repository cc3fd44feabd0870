package org.ondevice.core

import java.io.File
import java.io.IOException
import java.nio.charset.CharacterCodingException

/**
 * JSON lines or a table ([Tables]) as rows, with the format inferred from the keys as `ondevice/data/tasks/formats.py` infers it; every bad
 * row is named, never raised.
 *
 * | format          | keys                                                                        |
 * |-----------------|-----------------------------------------------------------------------------|
 * | chat            | messages: [{role, content}, ...]                                            |
 * | instruct        | instruction, output, and maybe input (or context, response); prompt, response; question, answer |
 * | completion      | prompt, completion                                                          |
 * | text            | text                                                                        |
 * | classification  | text or sentence, and label                                                 |
 * | multiple_choice | question or prompt, choices: [...], and answer                              |
 * | thumbs          | prompt, answer, and liked: true or false                                    |
 * | a task          | task, prompt_fields: {...}, label; or the task's columns flat               |
 */
object RowReader {
    /** True if a file of that name is read as a table and not as JSON lines. */
    fun isTable(name: String): Boolean = Tables.has(name)

    /** Read a file; see the other [read]. */
    fun read(file: File, task: String? = null, allowEmpty: Boolean = false): Rows = read(file.name, bytesOf(file), task, allowEmpty)

    private fun bytesOf(file: File): ByteArray {
        val bytes = try {
            file.readBytes()
        } catch (error: IOException) {
            throw dataError("cannot read ${file.name}", "a .jsonl or .csv file", error.message, "choose the file again")
        }
        return bytes
    }

    /**
     * @param name of the file, for messages; a table ends with .csv, .tsv or .tab.
     * @param bytes UTF-8, with or without a byte order mark, lines ended by LF or CRLF.
     * @param task a task of P-RGE's Table 7 ([Tasks]); null takes it from the rows' own "task", if any.
     * @param allowEmpty give the problems alone where no row is usable, instead of raising.
     * @throws OndeviceException [ErrorKind.DATA]: empty, no JSON lines, or not one row is usable.
     */
    fun read(name: String, bytes: ByteArray, task: String? = null, allowEmpty: Boolean = false): Rows =
        read(name, bytes, task?.let { Tasks.find(it) }, emptyMap(), allowEmpty)

    /** The same for any [Task], and for [columns] of other names, {field: column}. */
    internal fun read(name: String, bytes: ByteArray, task: Task?, columns: Map<String, String>, allowEmpty: Boolean): Rows {
        var chosen = task
        val problems = ArrayList<RowProblem>()
        val records = renamed(records(name, bytes, problems), chosen, columns, name, problems)
        if (records.isEmpty() && allowEmpty) return Rows(name, chosen?.kind ?: Format.TEXT, emptyList(), problems, chosen?.name)
        val format: Format
        if (chosen != null) {
            format = chosen.kind
        } else {
            val found = infer(name, records.map { it.second }, problems)
            format = found.first
            chosen = found.second
        }
        val convert = RowConverter(format, chosen, records.map { it.second })
        val items = ArrayList<Row>()
        for ((line, record) in records) {
            try {
                items.add(convert.row(line, record))
            } catch (bad: BadRow) {
                problems.add(RowProblem(name, line, bad.field, bad.reason))
            }
        }
        problems.sortBy { it.line }
        if (items.isEmpty() && !allowEmpty) throw noRows(name, problems)
        return Rows(name, format, items, problems, chosen?.name, duplicates(items), convert.unread, chosen, convert.classes)
    }

    /** Records with the columns under the names that formats know. */
    private fun renamed(
        records: List<Pair<Int, Map<*, *>>>, task: Task?, columns: Map<String, String>, name: String, problems: MutableList<RowProblem>,
    ): List<Pair<Int, Map<*, *>>> {
        val first = records.firstOrNull()?.second ?: return records
        if (columns.isEmpty()) {
            if (task != null || "prompt_fields" in first.keys || formatOf(first.keys) != null) return records
            val fields = Columns.withoutCase(first)
            return records.map { (line, record) -> line to Columns.renamed(record, fields) }
        }
        return records.mapNotNull { (line, record) ->
            try {
                line to Columns.named(record, columns, task)
            } catch (bad: BadRow) {
                problems.add(RowProblem(name, line, bad.field, bad.reason))
                null
            }
        }
    }

    private fun records(name: String, bytes: ByteArray, problems: MutableList<RowProblem>): List<Pair<Int, Map<*, *>>> {
        if (bytes.size >= 2 && (bytes[0].toInt() and 0xff) + (bytes[1].toInt() and 0xff) == 0x1fd && (bytes[0] == 0xff.toByte() || bytes[1] == 0xff.toByte())) {
            throw dataError("$name is UTF-16", "UTF-8", "UTF-16", "save it as UTF-8")
        }
        if (bytes.size >= 4 && bytes[0] == 'P'.code.toByte() && bytes[1] == 'K'.code.toByte() && bytes[2] == 3.toByte()) {
            throw dataError("$name is an Excel file or another zip", "text in UTF-8", "a zip", "save the sheet as CSV")
        }
        val bom = bytes.size >= 3 && bytes[0] == 0xef.toByte() && bytes[1] == 0xbb.toByte() && bytes[2] == 0xbf.toByte()
        val start = if (bom) 3 else 0
        val first = (start until bytes.size).firstOrNull { !blank(bytes[it]) }
            ?: throw dataError("$name is empty", "at least one row", "${bytes.size} bytes", "choose a file with one JSON object a line, or a table")
        if (Tables.has(name)) return Tables(name, bytes.copyOfRange(start, bytes.size)).records(problems)
        if (bytes[first] == '['.code.toByte()) {
            throw dataError("$name is one JSON list", "one JSON object a line", "[", "write it as JSON lines: jq -c '.[]'")
        }
        val found = ArrayList<Pair<Int, Map<*, *>>>()
        var begin = start
        var number = 0
        while (begin <= bytes.size) {
            var end = begin
            while (end < bytes.size && bytes[end] != '\n'.code.toByte()) end++
            number++
            if ((begin until end).any { !blank(bytes[it]) }) {
                try {
                    found.add(number to record(bytes.copyOfRange(begin, end)))
                } catch (bad: BadRow) {
                    problems.add(RowProblem(name, number, bad.field, bad.reason))
                }
            }
            begin = end + 1
        }
        return found
    }

    private fun blank(byte: Byte): Boolean = byte == 32.toByte() || byte in 9..13

    private fun record(line: ByteArray): Map<*, *> {
        if (line.any { it == 0.toByte() }) throw BadRow("", "contains a NUL byte")
        val text = try {
            Storage.decode(line)
        } catch (_: CharacterCodingException) {
            throw BadRow("", "is not UTF-8")
        }
        val value = try {
            Json.parse(text)
        } catch (error: JsonException) {
            throw BadRow(error.key, if (error.key.isEmpty()) "is not JSON: ${error.message}" else error.message ?: "")
        }
        return value as? Map<*, *> ?: throw BadRow("", "expected a JSON object, received ${describe(value)}")
    }

    private fun infer(name: String, records: List<Map<*, *>>, problems: List<RowProblem>): Pair<Format, Task?> {
        var unknown: Any? = null
        for (record in records) {
            if (record.containsKey("prompt_fields")) {
                val task = Tasks.ALL[Tasks.plainName(record["task"].toString())]
                if (task != null) return task.kind to task
                unknown = unknown ?: record["task"]
            } else {
                formatOf(record.keys)?.let { return it to null }
            }
        }
        if (unknown != null) {
            throw dataError(
                "$name is of a task without a prompt", "one of ${Tasks.ALL.keys.joinToString(", ")}", describe(unknown),
                "write the rows as prompt and completion, or as messages",
            )
        }
        if (records.isEmpty()) throw noRows(name, problems)
        throw dataError(
            "cannot tell the format of $name",
            "the keys messages; instruction and output; prompt and completion; text; text and label; " +
                "question, choices and answer; or a task with its columns",
            "the keys " + records[0].keys.joinToString(", "),
            "choose the task (${Tasks.ALL.keys.joinToString(", ")}) or rename the keys",
        )
    }

    internal fun formatOf(keys: Set<*>): Format? = when {
        "messages" in keys -> Format.CHAT
        "prompt" in keys && "answer" in keys && "liked" in keys -> Format.THUMBS
        "instruction" in keys && ("output" in keys || "response" in keys) -> Format.INSTRUCT
        "prompt" in keys && "response" in keys -> Format.INSTRUCT
        "prompt" in keys && "completion" in keys -> Format.COMPLETION
        "choices" in keys && "answer" in keys && ("question" in keys || "prompt" in keys) -> Format.MULTIPLE_CHOICE
        "question" in keys && ("answer" in keys || "response" in keys) -> Format.INSTRUCT
        ("text" in keys || "sentence" in keys) && "label" in keys -> Format.CLASSIFICATION
        "text" in keys -> Format.TEXT
        else -> null
    }

    private fun duplicates(items: List<Row>): List<Pair<Int, Int>> {
        val seen = HashMap<Row, Int>()
        return items.mapNotNull { row ->
            val known = seen.getOrPut(row.copy(line = 0)) { row.line }
            if (known == row.line) null else row.line to known
        }
    }

    private fun noRows(name: String, problems: List<RowProblem>): OndeviceException {
        val first = problems.take(3).joinToString("; ") + if (problems.size > 3) "; and ${problems.size - 3} more" else ""
        return dataError(
            if (problems.isEmpty()) "no row in $name" else "no usable row in $name: $first",
            "at least one row of a known format",
            if (problems.isEmpty()) "none" else "${problems.size} rows, all with problems",
            "correct the rows, or choose another file",
        )
    }
}
