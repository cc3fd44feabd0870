package org.ondevice.core

/** One record of a known format as a row; [row] raises [BadRow]. The texts are those of `ondevice/data/tasks/formats.py`. */
internal class RowConverter(private val format: Format, private val task: Task?, records: List<Map<*, *>>, labels: Map<String, String>? = null) {
    /** {label key: label text} of classification rows, in the candidates' order. */
    val classes: Map<String, String> =
        labels ?: if (task == null && format == Format.CLASSIFICATION) classesOf(records) else emptyMap()

    private val counts = HashMap<String, Int>()

    /** Columns and keys of the rows so far that nothing reads, the most frequent first. */
    val unread: Map<String, Int> get() = counts.entries.sortedByDescending { it.value }.associate { it.key to it.value }

    fun row(line: Int, record: Map<*, *>): Row {
        val row = converted(line, record)
        count(record.filterKeys { it !in (task?.let(::keysOf) ?: READ.getValue(format)) }, "")
        if (task == null && format == Format.CHAT) {
            for (turn in record["messages"] as List<*>) count((turn as Map<*, *>).filterKeys { it !in TURN }, "messages[].")
        }
        return row
    }

    private fun count(values: Map<*, *>, prefix: String) {
        for ((key, value) in values) if (says(value)) counts.merge("$prefix$key", 1, Int::plus)
    }

    private fun converted(line: Int, record: Map<*, *>): Row = when {
        task != null -> taskRow(task, line, record)
        format == Format.CHAT -> chatRow(line, record)
        format == Format.INSTRUCT -> instructRow(line, record)
        format == Format.COMPLETION ->
            Row(line, listOf(text(record, "prompt", empty = true) to text(record, "completion")))
        format == Format.THUMBS -> thumbsRow(line, record)
        format == Format.TEXT -> Row(line, listOf("" to text(record, "text")))
        format == Format.CLASSIFICATION -> classRow(line, record)
        else -> choiceRow(line, record)
    }

    private fun taskRow(task: Task, line: Int, record: Map<*, *>): Row {
        var fields = record
        if (record.containsKey("prompt_fields")) {
            val named = record["task"] ?: task.name
            if (!task.isOwn && Tasks.plainName(named.toString()) != task.name) {
                throw BadRow("task", "expected '${task.name}', received ${describe(named)}")
            }
            val given = record["prompt_fields"]
            if (given !is Map<*, *>) throw BadRow("prompt_fields", "expected an object, received ${describe(given)}")
            fields = if (record.containsKey("label")) given + ("label" to record["label"]) else given
        }
        val rendered = task.render(fields)
        return Row(line, rendered.pairs, rendered.gold, answers = rendered.answers, label = rendered.label, end = task.kind == Format.COMPLETION)
    }

    private fun chatRow(line: Int, record: Map<*, *>): Row {
        val messages = record["messages"]
        if (messages !is List<*> || messages.isEmpty()) {
            throw BadRow("messages", "expected a list of turns, received ${describe(messages)}")
        }
        val turns = ArrayList<Turn>()
        for ((index, message) in messages.withIndex()) {
            val where = "messages.$index"
            if (message !is Map<*, *>) throw BadRow(where, "expected an object with role and content, received ${describe(message)}")
            val role = message["role"]
            if (role !is String || role !in ROLES) throw BadRow("$where.role", "expected ${ROLES.joinToString(", ")}; received ${describe(role)}")
            refuse(message, if (role == "assistant") NOT_READ + WEIGHTS else NOT_READ, "$where.")
            turns.add(Turn(role, Texts.check(message["content"], "$where.content")))
        }
        refuse(record, COLUMNS_NOT_READ, "")
        val system = systemOf(record)
        if (system != null && turns[0].role != "system") turns.add(0, Turn("system", system))
        while (turns.isNotEmpty() && turns.last().role != "assistant") turns.removeAt(turns.size - 1)
        if (turns.isEmpty()) throw BadRow("messages", "has no assistant turn to train on")
        if (turns[0].role == "assistant") throw BadRow("messages.0.role", "expected system or user first, received assistant")
        return Row(line, turns = turns)
    }

    private fun instructRow(line: Int, record: Map<*, *>): Row {
        val instruction = text(record, "instruction", "prompt", "question")
        val context = text(record.filterValues { it != null }, "input", "context", empty = true)
        val answer = text(record, "output", "response", "answer")
        val given = !Texts.isBlank(context)
        val asked = if (given) "$instruction\n\n$context" else instruction
        val block = if (given) "\n\n### Input:\n$context" else ""
        refuse(record, listOf("history"), "")
        val system = systemOf(record)
        val before = if (system == null) "" else "$system\n\n"
        val prompt = "$before### Instruction:\n$instruction$block\n\n### Response:\n"
        val turns = listOfNotNull(system?.let { Turn("system", it) }, Turn("user", asked), Turn("assistant", answer))
        return Row(line, listOf(prompt to answer), turns = turns)
    }

    /** An answer that was judged; a record of a task to answer has no verdict. */
    private fun thumbsRow(line: Int, record: Map<*, *>): Row {
        val verdict = record["liked"]
        if (verdict !is Boolean) throw BadRow("liked", "expected true or false; received ${describe(verdict)}")
        val prompt = text(record, "prompt")
        val answer = text(record, "answer")
        val turns = listOf(Turn("user", prompt), Turn("assistant", answer))
        return Row(line, listOf("${prompt.trimEnd { Texts.isSpace(it) }}\n" to answer), turns = turns, label = if (verdict) "up" else "down")
    }

    private fun systemOf(record: Map<*, *>): String? {
        val key = SYSTEM.firstOrNull { record[it] != null } ?: return null
        return Texts.check(record[key], key, empty = true).takeUnless { Texts.isBlank(it) }
    }

    /** Leave out a row that says what the app does not do: in silence it would train something else. */
    private fun refuse(values: Map<*, *>, keys: List<String>, where: String) {
        val key = keys.firstOrNull { says(values[it]) && !(it in WEIGHTS && trains(it, values[it])) } ?: return
        throw BadRow("$where$key", "is not read by the app: train on such rows with the command line")
    }

    private fun says(value: Any?): Boolean =
        value != null && value != "" && value != emptyList<Any>() && value != emptyMap<Any, Any>()

    private fun trains(key: String, value: Any?): Boolean =
        if (key == "masked") value == false || value == 0L || value == 0.0 else value == true || value == 1L || value == 1.0

    private fun classRow(line: Int, record: Map<*, *>): Row {
        val text = text(record, "text", "sentence")
        val label = record["label"]
        val key = labelKey(label)
        if (key.isNullOrEmpty()) throw BadRow("label", "expected a text, a number or a boolean, received ${describe(label)}")
        if (key !in classes) throw BadRow("label", "expected one of ${classes.keys.joinToString(", ")}; received ${describe(label)}")
        Texts.check(classes[key], "label")
        val pairs = classes.values.map { "${Texts.strip(text)}\nLabel:" to " $it" }
        return Row(line, pairs, classes.keys.indexOf(key), label = classes[key], end = false)
    }

    private fun choiceRow(line: Int, record: Map<*, *>): Row {
        val question = Texts.strip(text(record, "question", "prompt"))
        val choices = record["choices"].let { if (it is String) listOfCell(it) else it }
        if (choices !is List<*> || choices.size < 2) {
            throw BadRow("choices", "expected a list of at least two texts, received ${describe(choices)}")
        }
        val texts = choices.mapIndexed { index, choice -> Texts.strip(Texts.check(choice, "choices.$index")) }
        val gold = choiceIndex(record["answer"], texts)
        val label = if (gold < 26) ('A' + gold).toString() else gold.toString()
        return Row(line, texts.map { "$question\nAnswer:" to " $it" }, gold, label = label, end = false)
    }

    private fun listOfCell(cell: String): Any? = try {
        Json.parse(cell)
    } catch (_: JsonException) {
        throw BadRow("choices", "expected a JSON list of texts in the cell")
    }

    private fun text(record: Map<*, *>, vararg keys: String, empty: Boolean = false): String {
        for (key in keys) if (record.containsKey(key)) return Texts.check(record[key], key, empty)
        if (empty) return ""
        throw BadRow(keys[0], "is missing; the keys are ${record.keys.joinToString(", ")}")
    }

    companion object {
        const val MAX_CLASSES = 50
        private val ROLES = listOf("system", "user", "assistant")
        private val SYSTEM = listOf("system", "system_prompt", "system_message")

        /** Keys of a turn, and columns, that change what is trained on, and that the app does not follow. */
        private val NOT_READ = listOf(
            "tool_calls", "function_call", "reasoning_content", "thinking", "reasoning", "mask", "train_detail",
        )
        private val WEIGHTS = listOf("weight", "train", "training", "trainable", "loss", "masked")
        private val COLUMNS_NOT_READ = listOf(
            "tools", "functions", "documents", "chat_template_kwargs", "weights", "loss_mask", "train_mask", "turn_mask",
        )
        private val TURN = setOf("role", "content") + WEIGHTS

        private val READ: Map<Format, Set<String>> = mapOf(
            Format.CHAT to setOf("messages") + SYSTEM,
            Format.INSTRUCT to setOf("instruction", "prompt", "input", "context", "output", "response", "question", "answer") + SYSTEM,
            Format.COMPLETION to setOf("prompt", "completion"),
            Format.TEXT to setOf("text"),
            Format.CLASSIFICATION to setOf("text", "sentence", "label"),
            Format.MULTIPLE_CHOICE to setOf("question", "prompt", "choices", "answer"),
            Format.QA to emptySet(),
            Format.REGRESSION to emptySet(),
            Format.THUMBS to setOf("prompt", "answer", "liked"),
        )

        private fun keysOf(task: Task): Set<String> =
            (task.columns.values.flatten() + task.labels + task.reads).map { it.substringBefore('.') }.toSet() +
                setOf("task", "prompt_fields")

        /** The index of the choice that [answer] names: by its text, its letter or its index. */
        fun choiceIndex(answer: Any?, texts: List<String>): Int {
            val letters = texts.indices.take(26).map { ('A' + it).toString() }
            if (answer is Long && answer in texts.indices) return answer.toInt()
            if (answer is String) {
                for (known in listOf(texts, letters, texts.indices.map { it.toString() })) {
                    val index = known.indexOf(Texts.strip(answer))
                    if (index >= 0) return index
                }
            }
            val allowed = "one of the choices, ${letters.first()} to ${letters.last()}, or 0 to ${texts.size - 1}"
            throw BadRow("answer", "expected $allowed; received ${describe(answer)}")
        }

        /** The label as the text by which choices know it: 1, 1.0, "1" and " 1 " are the same label. */
        fun labelKey(value: Any?): String? = when (value) {
            is Boolean -> value.toString()
            is Long -> if (value in -999_999_999L..999_999_999L) value.toString() else null
            is Double -> when {
                value.isNaN() || value <= -1e9 || value >= 1e9 -> null
                value == Math.rint(value) -> value.toLong().toString()
                else -> value.toString()
            }
            is String -> Texts.strip(value).lowercase()
            else -> null
        }

        /** {label key: answer text} of every label in the file, sorted by key as Python sorts texts. */
        private fun classesOf(records: List<Map<*, *>>): Map<String, String> {
            val found = HashMap<String, String>()
            for (record in records) {
                val key = labelKey(record["label"])
                if (!key.isNullOrEmpty()) found.getOrPut(key) { Texts.strip(shown(record["label"])) }
            }
            val keys = found.keys.sortedWith(::compareCodePoints)
            if (keys.size > MAX_CLASSES) {
                throw dataError(
                    "${keys.size} different labels are too many for classes", "at most $MAX_CLASSES different values of 'label'",
                    keys.take(4).joinToString(", ") + ", ...", "for free answers name the columns prompt and completion",
                )
            }
            return keys.associateWith { found.getValue(it) }
        }

        /** A label as Python's `str` shows it. */
        private fun shown(value: Any?): String = when (value) {
            true -> "True"
            false -> "False"
            else -> value.toString()
        }

        private fun compareCodePoints(left: String, right: String): Int {
            val a = left.codePoints().toArray()
            val b = right.codePoints().toArray()
            for (index in 0 until minOf(a.size, b.size)) if (a[index] != b[index]) return a[index].compareTo(b[index])
            return a.size.compareTo(b.size)
        }
    }
}
