package org.ondevice.core

/** Columns of other names than the formats', after `ondevice/data/tasks/columns.py`: named by the user, or found by case. */
internal object Columns {
    private val FIELDS = setOf(
        "messages", "conversations", "tools", "prompt", "completion", "instruction", "input", "context", "output", "response", "text", "sentence",
        "label", "question", "choices", "answer", "chosen", "rejected", "thumbs", "liked", "system", "system_prompt", "history",
    )

    /** {field: column} of a record whose names differ in case only; empty if they then fit no format. */
    fun withoutCase(record: Map<*, *>): Map<String, String> {
        val lowered = record.keys.associateBy({ Texts.strip("$it").lowercase() }, { "$it" })
        if (lowered.size < record.size || RowReader.formatOf(lowered.keys) == null) return emptyMap()
        return lowered.filter { (field, column) -> field in FIELDS && field != column }
    }

    fun renamed(record: Map<*, *>, fields: Map<String, String>): Map<*, *> {
        if (fields.isEmpty()) return record
        val names = fields.entries.associate { (field, column) -> column to field }
        return record.entries.associate { (key, value) -> (names[key] ?: key) to value }
    }

    /**
     * The record with the user's columns under the names that the format or [task] looks for.
     *
     * @throws BadRow a column is missing.
     */
    fun named(record: Map<*, *>, columns: Map<String, String>, task: Task?): Map<*, *> {
        val values = columns.entries.associate { (field, column) -> key(field, task) to Task.column(record, listOf(column)) }
        return record.filterKeys { it in values || it !in columns.values } + values
    }

    /** The column that a task looks for first; other formats have one name a field. */
    private fun key(field: String, task: Task?): String {
        if (task == null) return field
        for ((name, keys) in task.columns) if (field == name || field in keys) return keys[0]
        return task.labels[0]
    }
}
