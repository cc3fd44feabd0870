package org.ondevice.core

/**
 * Rows as token ids with label masks: only the answer is trained on, and the answer is never cut. Ids and labels
 * are those of `ondevice/data/encode.py`.
 *
 * Trained are: assistant turns with their end-of-turn token (chat, and instruct where the tokenizer has a chat
 * template); the answer and the end-of-sequence token (completion, instruct); the answer alone (classification,
 * multiple choice, question answering); everything (text, cut into windows that overlap by one token).
 * Prompt and answer are tokenized as one text; a token across the boundary belongs to the answer.
 *
 * @param chatTemplate frames conversations; the tokenizer's own unless given.
 * @param maxLengthTokens longest sequence, at least 2: [Manifest.longestTokens]. Prompts lose tokens at their front
 *   to fit, and conversations whole turns; a row whose answer does not fit behind one token of context, or whose last
 *   turns do not fit whole, becomes a problem.
 * @param trainOnPrompt label the prompt, too; candidates always label the answer only.
 */
class Encoder(
    private val tokenizer: Tokenizer,
    private val maxLengthTokens: Int,
    private val trainOnPrompt: Boolean = false,
    private val chatTemplate: String? = tokenizer.chatTemplate,
) {
    private val limit get() = maxLengthTokens
    private var chat: ChatTemplate? = null

    init {
        if (maxLengthTokens < 2) throw configError("max_length_tokens is too small", "at least 2", maxLengthTokens)
    }

    /**
     * @param allowEmpty give the problems alone where no row could be encoded, instead of raising.
     * @throws OndeviceException [ErrorKind.DATA]: nothing can be trained on, or chat rows and no chat template.
     */
    fun encode(rows: Rows, allowEmpty: Boolean = false): Dataset {
        chat = chatOf(rows)
        val framed = if (rows.format == Format.INSTRUCT) "instruction prompt" else rows.task ?: ""
        val items = ArrayList<Item>()
        val problems = ArrayList(rows.problems)
        var tooLong = 0
        for (row in rows.items) {
            try {
                if (rows.format == Format.TEXT) items.addAll(windows(row)) else items.add(item(row, if (rows.format == Format.THUMBS) row.label == "up" else null))
            } catch (bad: BadRow) {
                problems.add(RowProblem(rows.file, row.line, bad.field, bad.reason))
                if (bad.lengthTokens > 0) tooLong++
            }
        }
        problems.sortBy { it.line }
        if (items.isEmpty() && !allowEmpty) {
            throw dataError(
                "no row can be trained on: ${problems.firstOrNull() ?: "${rows.file} has no rows"}",
                received = "${rows.items.size} rows", hint = "shorten the answers, or export the program with a longer length",
            )
        }
        return Dataset(items, problems, rows.format, limit, tooLong, if (chat != null) "chat template" else framed)
    }

    private fun item(row: Row, liked: Boolean?): Item = chat?.let { chatItem(row, it, liked) } ?: pairItem(row, liked)

    private fun chatOf(rows: Rows): ChatTemplate? {
        val first = rows.items.firstOrNull() ?: return null
        if (first.turns.isEmpty()) return null
        val template = chatTemplate
        if (template == null && first.pairs.isNotEmpty()) return null
        return ChatTemplate.of(
            template ?: throw dataError(
                "${rows.file} has chat rows, and the tokenizer has no chat template",
                "a model with a chat template, as instruction-tuned models have", "none",
                "use an instruction-tuned model, or write the rows as prompt and completion",
            ),
        )
    }

    private fun pairItem(row: Row, liked: Boolean?): Item {
        val whole = row.pairs.map { (prompt, answer) -> tokenize(prompt + answer) }
        val shared = HashMap<String, IntArray>()
        for ((pair, ids) in row.pairs.zip(whole)) {
            val known = shared.getOrPut(pair.first) { tokenize(pair.first) }
            shared[pair.first] = known.copyOf(commonPrefix(known, ids))
        }
        val starts = row.pairs.map { shared.getValue(it.first).size }
        val eos = tokenizer.eosId
        val sequences = whole.mapIndexed { index, ids ->
            val ended = if (row.end && eos != null && (ids.isEmpty() || ids.last() != eos)) ids + eos else ids
            if (ended.size - maxOf(starts[index], 1) < 1) throw BadRow("", "the answer has no token that can be trained on")
            ended
        }
        val longest = sequences.indices.maxOf { sequences[it].size - starts[it] }
        checkFit(longest, starts.min())
        val bos = leadingBos(sequences[0], starts[0])
        val keep = limit - longest
        var dropped = 0
        val cut = sequences.mapIndexed { index, ids ->
            val lost = maxOf(0, starts[index] - keep)
            dropped = maxOf(dropped, lost)
            without(ids, bos, lost) to starts[index] - lost
        }
        val candidates = if (row.gold == null) emptyList() else cut.map { (ids, start) -> Example.from(ids, start) }
        val (ids, start) = cut[row.gold ?: 0]
        val answers = if (row.gold == null) row.answers else row.pairs.map { Texts.strip(it.second) }
        return Item(Example.from(ids, if (trainOnPrompt) 0 else start), candidates, row.gold, answers, row.line, start, dropped, liked)
    }

    /** Whole turns go, from the oldest after the system turn; the last exchange stays whole, or the row is left out. */
    private fun chatItem(row: Row, template: ChatTemplate, liked: Boolean?): Item {
        var turns = row.turns
        var chat = template.encode(tokenizer, turns)
        val full = chat.ids.size
        val system = if (turns[0].role == "system") 1 else 0
        while (chat.ids.size > limit) {
            val rest = turns.subList(system, turns.size)
            val following = rest.indices.firstOrNull { it > 0 && rest[it].role == "user" } ?: break
            turns = turns.subList(0, system) + rest.subList(following, rest.size)
            chat = template.encode(tokenizer, turns)
        }
        val ids = chat.ids
        val trained = chat.trained
        val start = chat.start
        if (ids.size > limit) {
            checkFit(ids.size - start, start)
            throw BadRow("", "the last turns have ${ids.size} tokens; with max_length_tokens=$limit they do not fit whole", full)
        }
        if (!trained.drop(1).any { it }) throw BadRow("messages", "no assistant turn has a token that can be trained on")
        val labels = IntArray(ids.size) { if (trainOnPrompt || trained[it]) ids[it] else IGNORE }
        return Item(Example(ids, labels), line = row.line, promptTokens = start, droppedTokens = full - ids.size, liked = liked)
    }

    /** Plain text in windows of at most [limit] tokens; each begins with the last token of the one before. */
    private fun windows(row: Row): List<Item> {
        var ids = once(tokenizer.encode(row.pairs[0].second, addSpecialTokens = true))
        val eos = tokenizer.eosId
        if (row.end && eos != null && (ids.isEmpty() || ids.last() != eos)) ids += eos
        if (ids.size < 2) throw BadRow("text", "has fewer than two tokens")
        return (0 until ids.size - 1 step limit - 1).map { begin ->
            Item(Example.from(ids.copyOfRange(begin, minOf(begin + limit, ids.size)), 0), line = row.line)
        }
    }

    /** Ids with the special tokens that the tokenizer adds in front, but none that it adds behind. */
    private fun tokenize(text: String): IntArray {
        var ids = once(tokenizer.encode(text, addSpecialTokens = true))
        val eos = tokenizer.eosId ?: return ids
        while (ids.isNotEmpty() && ids.last() == eos && !text.endsWith(tokenizer.eosToken!!)) ids = ids.copyOf(ids.size - 1)
        return ids
    }

    /** Ids with one BOS: a text that begins with its mark has two, as the tokenizer puts one in front of every text. */
    private fun once(ids: IntArray): IntArray =
        if (ids.size > 1 && tokenizer.bosId != null && ids[0] == tokenizer.bosId && ids[1] == ids[0]) ids.copyOfRange(1, ids.size) else ids

    private fun checkFit(answerTokens: Int, promptTokens: Int) {
        val room = if (promptTokens > 0) limit - 1 else limit
        if (answerTokens > room) {
            val reason = "the answer has $answerTokens tokens; with max_length_tokens=$limit at most $room fit"
            throw BadRow("", reason, promptTokens + answerTokens)
        }
    }

    /** 1 if the sequence begins with a BOS token that truncation has to keep, else 0. */
    private fun leadingBos(ids: IntArray, start: Int): Int =
        if (start > 0 && tokenizer.bosId != null && ids[0] == tokenizer.bosId) 1 else 0

    private fun without(ids: IntArray, bos: Int, lost: Int): IntArray =
        if (lost == 0) ids else ids.copyOf(bos) + ids.copyOfRange(bos + lost, ids.size)

    private fun commonPrefix(first: IntArray, second: IntArray): Int {
        val end = minOf(first.size, second.size)
        return (0 until end).firstOrNull { first[it] != second[it] } ?: end
    }
}
