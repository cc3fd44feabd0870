package org.ondevice.core

import kotlin.math.exp
import kotlin.random.Random

/** An answer with how likely the model finds it: share among the candidates (0 to 1) and mean log likelihood a token. */
class RankedAnswer(val answer: String, val share: Double, val meanLogLikelihood: Double)

/** What one adapter makes of a prompt: ranked answers, or the text that it wrote. */
class TrialSide(val ranked: List<RankedAnswer>, val text: String?)

/** The 'try' screen: the base model, or another adapter, and the trained one side by side; null while it is to come. */
class TrialResult(val before: TrialSide, val after: TrialSide?)

/**
 * Tries a prompt before and after training.
 *
 * A program with a method `next_token` writes an answer, and so does one with a cache. One exported without can judge: it
 * scores the candidates that are given, such as the task's labels.
 *
 * @param answers what writes in place of [session]'s program, where there is one; of that program nothing is called then.
 */
class Trial(private val session: Session, private val tokenizer: Tokenizer, private val answers: PackedAnswers? = null) {
    /** The adapter that a run starts from: it changes nothing of the base model. */
    private val untrained: FloatArray by lazy { session.artifact.first(session.manifest.spec.adapter).floats() }

    /** True where the program can write. */
    val canGenerate: Boolean get() = answers != null || session.generates

    private val chat: ChatTemplate? by lazy {
        try {
            tokenizer.chatTemplate?.let(ChatTemplate::of)
        } catch (_: OndeviceException) { // one that the app does not render
            null
        }
    }

    /** True where a prompt can be put as a user's turn of the model's own chat template. */
    val canChat: Boolean get() = chat != null

    /**
     * Choose among the task's candidates, with [other] (the base model unless given) and with [adapter]: shares are the
     * softmax of the candidates' mean log likelihood a token, as `ondevice eval` ranks them.
     *
     * @param fields texts by the names of [TaskRecord.fields].
     * @throws OndeviceException [ErrorKind.DATA] when a field is empty or a candidate does not fit the program.
     */
    fun classify(task: TaskRecord, fields: Map<String, String>, adapter: FloatArray, other: FloatArray = untrained): TrialResult {
        val item = asked(task, fields)
        val evaluator = Evaluator(listOf(item), tokenizer.padId)
        val side = { flat: FloatArray -> TrialSide(ranked(item.answers, evaluator.run(session, flat)!!.predictions[0].scores), null) }
        return TrialResult(side(other), side(adapter))
    }

    /** A text of [task] as the training has it: the prompt's tokens in front, and a candidate for each answer. */
    internal fun asked(task: TaskRecord, fields: Map<String, String>): Item {
        val longest = session.manifest.longestTokens
        val limit = if (task.maxLengthTokens < 2) longest else minOf(longest, task.maxLengthTokens)
        return Encoder(tokenizer, limit, chatTemplate = task.chatTemplate ?: tokenizer.chatTemplate).encode(task.rows(fields)).items[0]
    }

    /**
     * Score [candidates] as continuations of [prompt], with [other] (the base model unless given) and with [adapter].
     *
     * @throws OndeviceException [ErrorKind.DATA] when nothing is given or an answer does not fit the program.
     */
    fun judge(prompt: String, candidates: List<String>, adapter: FloatArray, other: FloatArray = untrained): TrialResult {
        if (candidates.isEmpty()) throw dataError("there is no answer to judge", "one answer or more", "none", "write some answers to compare")
        val row = Row(line = 1, pairs = candidates.map { prompt to it }, gold = 0, end = false)
        val encoder = Encoder(tokenizer, session.manifest.longestTokens)
        val item = encoder.encode(Rows("the prompt", Format.MULTIPLE_CHOICE, listOf(row), emptyList())).items[0]
        val evaluator = Evaluator(listOf(item), tokenizer.padId)
        val side = { flat: FloatArray -> TrialSide(ranked(candidates, evaluator.run(session, flat)!!.predictions[0].scores), null) }
        return TrialResult(side(other), side(adapter))
    }

    /**
     * Write an answer to [prompt] with [other] (the base model unless given) and with [adapter].
     *
     * @param asChat put the prompt as a user's turn; only where [canChat].
     * @param onText told of what is written so far after every token, on the calling thread.
     * @param sampling how tokens are drawn, and what ends the answer.
     * @param task frames [fields] as it was trained, in place of [prompt], and its ends end the answer.
     * @param shouldStop asked before every token; what is written by then is the answer.
     */
    fun generate(
        prompt: String,
        adapter: FloatArray,
        other: FloatArray = untrained,
        asChat: Boolean = false,
        sampling: Sampling = Sampling(),
        task: TaskRecord? = null,
        fields: Map<String, String> = emptyMap(),
        shouldStop: () -> Boolean = { false },
        onText: (TrialResult) -> Unit = {},
    ): TrialResult {
        if (!canGenerate) {
            val methods = session.manifest.spec.methods.keys.joinToString(", ")
            throw artifactError("the program cannot write text", "a program exported with export.context_tokens", methods, "score answers instead")
        }
        val ids = if (task == null || task.format == Format.TEXT) ids(prompt, asChat) else framed(task, fields)
        val ends = setOfNotNull(tokenizer.eosId, chatEnd.takeIf { asChat }) + task?.ends.orEmpty().mapNotNull(::idOf)
        // A trained answer to a question is its first line.
        val drawn = if (task?.format == Format.QA) sampling.endingAt("\n") else sampling
        val writer = { flat: FloatArray, told: (TrialSide) -> Unit ->
            TrialSide(emptyList(), write(ids, flat, drawn, ends, shouldStop) { told(TrialSide(emptyList(), it)) })
        }
        val before = writer(other) { onText(TrialResult(it, null)) }
        return TrialResult(before, writer(adapter) { onText(TrialResult(before, it)) })
    }

    private fun ids(prompt: String, asChat: Boolean): IntArray {
        val template = if (asChat) chat ?: throw artifactError("the model has no chat template that the app can render", hint = "write without it") else null
        if (template != null && prompt.isBlank()) throw dataError("the prompt is empty", hint = "write something for the model to answer")
        val ids = if (template == null) tokenizer.encode(prompt, addSpecialTokens = true)
        else tokenizer.encode(template.render(listOf(Turn("user", prompt)), ask = true), addSpecialTokens = false)
        if (ids.isEmpty()) throw dataError("the prompt is empty", hint = "write something for the model to continue")
        return ids
    }

    /** The token that a chat puts behind an answer; null where that is not one token. */
    private val chatEnd: Int? by lazy { idOf(ChatTemplate.END) }

    private fun idOf(token: String): Int? = tokenizer.encode(token, addSpecialTokens = false).singleOrNull()

    private fun framed(task: TaskRecord, fields: Map<String, String>): IntArray {
        val item = asked(task, fields)
        if (item.promptTokens == 0) throw dataError("the prompt is empty", hint = "write something for the model to answer")
        return item.example.ids.copyOf(item.promptTokens)
    }

    private fun write(
        prompt: IntArray, flat: FloatArray, sampling: Sampling, ends: Set<Int>, shouldStop: () -> Boolean, onText: (String) -> Unit,
    ): String {
        val random = Random(sampling.seed)
        val reader = answers?.reader(flat) ?: session.reader(tokenizer.padId, flat)
        val answer = IntList()
        // A prompt that fills the context loses its begin: a quarter is for the answer.
        var left = reader.contextTokens ?: Int.MAX_VALUE
        val kept = if (prompt.size < left) prompt.size else left * 3 / 4
        var next = prompt.copyOfRange(prompt.size - kept, prompt.size)
        while (answer.size < sampling.maxTokens && next.size <= left && !shouldStop()) {
            left -= next.size
            val token = sampling.pick(reader.feed(next), random)
            if (token in ends) break
            answer.add(token)
            val text = tokenizer.decode(answer.toArray())
            val end = sampling.end(text)
            onText(if (end < 0) text else text.substring(0, end))
            if (end >= 0) return text.substring(0, end)
            next = intArrayOf(token)
        }
        return tokenizer.decode(answer.toArray())
    }

    companion object {
        private fun ranked(candidates: List<String>, scores: List<Double>): List<RankedAnswer> {
            val top = scores.max()
            val weights = scores.map { if (it.isFinite()) exp(it - top) else 0.0 }
            val sum = weights.sum()
            return candidates.indices.map { RankedAnswer(candidates[it].trim(), if (sum > 0) weights[it] / sum else 0.0, scores[it]) }
                .sortedByDescending { it.meanLogLikelihood }
        }
    }
}
