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
 * A program with a method `next_token` writes an answer. One exported without it can judge: it scores
 * the candidates that are given, such as the task's labels.
 */
class Trial(private val session: Session, private val tokenizer: Tokenizer) {
    /** The adapter that a run starts from: it changes nothing of the base model. */
    private val untrained: FloatArray by lazy { session.artifact.first(session.manifest.spec.adapter).floats() }

    /** True where the program can write. */
    val canGenerate: Boolean get() = session.generates

    private val chat: ChatTemplate? by lazy {
        try {
            tokenizer.chatTemplate?.let(ChatTemplate::of)
        } catch (_: OndeviceException) { // one that the app does not render
            null
        }
    }

    /** True where a prompt can be put as a user's turn of the model's own chat template. */
    val canChat: Boolean get() = chat != null

    /** The task's prompt for the texts of its columns, and its answers; null when the artifact is of no task with classes. */
    fun ofTask(fields: Map<String, String>): Pair<String, List<String>>? {
        val task = session.manifest.task?.let { Tasks.ALL[Tasks.plainName(it)] } ?: return null
        if (task.kind != Format.CLASSIFICATION) return null
        return try {
            val rendered = task.render(fields + ("label" to task.choices[0].labels[0]))
            rendered.pairs[0].first to task.choices.map { it.answer }
        } catch (bad: BadRow) {
            throw dataError("'${bad.field}' ${bad.reason}", hint = "fill in the field")
        }
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
     * @param maxTokens longest answer.
     * @param temperature 0 takes the most likely token; above, tokens are drawn with [seed].
     * @param shouldStop asked before every token; what is written by then is the answer.
     */
    fun generate(
        prompt: String,
        adapter: FloatArray,
        other: FloatArray = untrained,
        asChat: Boolean = false,
        maxTokens: Int = 32,
        temperature: Float = 0f,
        seed: Long = 0,
        shouldStop: () -> Boolean = { false },
        onText: (TrialResult) -> Unit = {},
    ): TrialResult {
        if (!canGenerate) {
            val methods = session.manifest.spec.methods.keys.joinToString(", ")
            throw artifactError("the program cannot write text", "a program exported with export.next_token", methods, "score answers instead")
        }
        val ids = ids(prompt, asChat)
        val writer = { flat: FloatArray, told: (TrialSide) -> Unit ->
            TrialSide(emptyList(), write(ids, flat, maxTokens, temperature, Random(seed), shouldStop) { told(TrialSide(emptyList(), it)) })
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

    private fun write(
        prompt: IntArray, flat: FloatArray, maxTokens: Int, temperature: Float, random: Random, shouldStop: () -> Boolean, onText: (String) -> Unit,
    ): String {
        val columns = session.nextTokenColumns
        var ids = prompt
        val answer = IntList()
        while (answer.size < maxTokens && !shouldStop()) {
            if (ids.size > columns) ids = ids.copyOfRange(ids.size - columns, ids.size)
            val padded = LongArray(columns) { if (it < ids.size) ids[it].toLong() else tokenizer.padId.toLong() }
            val next = pick(session.nextToken(padded, ids.size, flat), temperature, random)
            if (next == tokenizer.eosId) break
            answer.add(next)
            ids += next
            onText(tokenizer.decode(answer.toArray()))
        }
        return tokenizer.decode(answer.toArray())
    }

    companion object {
        /** Index of the next token: the highest logit, or one drawn from the softmax of `logits / temperature`. */
        internal fun pick(logits: FloatArray, temperature: Float, random: Random): Int {
            val best = logits.indices.maxByOrNull { if (logits[it].isNaN()) Float.NEGATIVE_INFINITY else logits[it] } ?: 0
            if (temperature <= 0f) return best
            val weights = DoubleArray(logits.size) { if (logits[it].isNaN()) 0.0 else exp((logits[it] - logits[best]).toDouble() / temperature) }
            var left = random.nextDouble() * weights.sum()
            for (index in weights.indices) {
                left -= weights[index]
                if (left < 0) return index
            }
            return best
        }

        private fun ranked(candidates: List<String>, scores: List<Double>): List<RankedAnswer> {
            val top = scores.max()
            val weights = scores.map { if (it.isFinite()) exp(it - top) else 0.0 }
            val sum = weights.sum()
            return candidates.indices.map { RankedAnswer(candidates[it].trim(), if (sum > 0) weights[it] / sum else 0.0, scores[it]) }
                .sortedByDescending { it.meanLogLikelihood }
        }
    }
}
