package org.ondevice.core

/**
 * One row, judged: [loss] of the right answer in nats a token (null without a labelled token), the index of the
 * right and of the most likely candidate, and the mean log likelihood a token of each.
 */
class Prediction(val line: Int, val loss: Double?, val gold: Int?, val predicted: Int?, val scores: List<Double>)

/**
 * Figures over all rows, as `ondevice/training/evaluate.py` takes them.
 *
 * @property loss nats a token over all tokens of the right answers.
 * @property accuracy share of rows whose right candidate is the most likely; null without candidates.
 * @property preferences rewards of liked and disliked answers, their margin and the KL; null for other rows.
 * @property majorityShare accuracy of always giving the most frequent answer.
 */
class EvalResult(
    val loss: Double,
    val accuracy: Double?,
    val majorityShare: Double?,
    val rows: Int,
    val tokens: Long,
    val secondsS: Double,
    val predictions: List<Prediction>,
    val preferences: Map<String, Double>? = null,
) {
    /** For comparison, element by element, higher is better: accuracy first where there is one, then the loss. */
    val score: List<Double>
        get() {
            val quality = if (loss.isFinite()) -loss else -Double.MAX_VALUE
            return if (accuracy == null) listOf(quality) else listOf(accuracy, quality)
        }

    internal fun figures(): Map<String, Any?> = linkedMapOf(
        "loss" to loss, "accuracy" to accuracy, "f1" to null, "exact_match" to null, "majority_share" to majorityShare,
        "rows" to rows, "tokens" to tokens, "seconds_s" to secondsS,
    ) + (preferences?.let { mapOf("preferences" to it) } ?: emptyMap())
}

/** Judges an adapter by rows. */
fun interface Judge {
    /**
     * @param flat the adapter to judge.
     * @param shouldStop asked before every batch; the evaluation is given up with null if it says yes.
     */
    fun run(session: Session, flat: FloatArray, shouldStop: () -> Boolean): EvalResult?
}

/**
 * Runs the program's `evaluate` over encoded rows. A row with candidates is scored once for each; the candidate
 * with the highest mean log likelihood a token is the answer. The program's batch is always filled; the last one
 * is padded with copies that are not counted.
 */
class Evaluator(private val items: List<Item>, private val padId: Int) : Judge {
    init {
        if (items.isEmpty()) throw dataError("there are no rows to evaluate", "one row or more", "none", "choose data for evaluation")
    }

    /** Judge the session's own adapter, or [flat]. */
    fun run(session: Session, flat: FloatArray = session.adapter): EvalResult? = run(session, flat) { false }

    /** Summed negative log likelihood, nats, and labelled tokens of an example. */
    internal class Total(val nll: Double, val tokens: Long)

    /** Totals by row and candidate, -1 for a right answer that is not one of them; null if stopped. */
    internal fun totals(session: Session, flat: FloatArray, shouldStop: () -> Boolean): Map<Pair<Int, Int>, Total>? {
        val jobs = items.flatMapIndexed { index, item -> slots(item).map { (slot, example) -> Job(index, slot, example) } }
            .sortedByDescending { it.example.size }
        val totals = HashMap<Pair<Int, Int>, Total>()
        val size = session.manifest.evalBatchSize
        for (part in jobs.chunked(size)) {
            if (shouldStop()) return null
            val losses = session.evaluate(batch(session.manifest, part, size), flat)
            for ((row, job) in part.withIndex()) totals[job.item to job.slot] = Total(losses.nll[row].toDouble(), losses.tokens[row])
        }
        return totals
    }

    override fun run(session: Session, flat: FloatArray, shouldStop: () -> Boolean): EvalResult? {
        val started = System.nanoTime()
        val totals = totals(session, flat, shouldStop) ?: return null
        var goldNll = 0.0
        var goldTokens = 0L
        val predictions = items.mapIndexed { index, item ->
            val right = totals.getValue(index to (item.gold ?: -1))
            val sum = right.nll
            val count = right.tokens
            goldNll += sum
            goldTokens += count
            val scores = item.candidates.indices.map { slot -> totals.getValue(index to slot).let { score(it.nll, it.tokens) } }
            val predicted = scores.indices.maxByOrNull { scores[it] }
            Prediction(item.line, if (count > 0) sum / count else null, item.gold, predicted, scores)
        }
        return summary(predictions, goldNll, goldTokens, (System.nanoTime() - started) / 1e9)
    }

    private class Job(val item: Int, val slot: Int, val example: Example)

    /** The candidates under their index; the right answer under -1 where it is not one of them. */
    private fun slots(item: Item): List<Pair<Int, Example>> {
        val found = item.candidates.mapIndexed { index, example -> index to example }
        return if (item.gold != null) found else listOf(-1 to item.example) + found
    }

    private fun batch(manifest: Manifest, part: List<Job>, size: Int): Batch {
        val need = part.maxOf { it.example.size }
        val length = manifest.lengthFor(need) ?: throw dataError(
            "line ${items[part[0].item].line} of the evaluation data is longer than the program takes",
            "at most ${manifest.longestTokens} tokens", "$need tokens", "export the program with a longer length",
        )
        val examples = part.map { it.example } + List(size - part.size) { part.last().example }
        return Batch.pad(examples, length, padId)
    }

    private fun summary(predictions: List<Prediction>, nll: Double, tokens: Long, seconds: Double): EvalResult {
        val judged = predictions.filter { it.gold != null && it.predicted != null }
        val golds = judged.groupingBy { it.gold }.eachCount()
        return EvalResult(
            loss = if (tokens > 0) nll / tokens else Double.NaN,
            accuracy = if (judged.isEmpty()) null else judged.count { it.gold == it.predicted }.toDouble() / judged.size,
            majorityShare = if (judged.isEmpty()) null else golds.values.max().toDouble() / judged.size,
            rows = predictions.size,
            tokens = tokens,
            secondsS = seconds,
            predictions = predictions,
        )
    }

    companion object {
        /** Mean log likelihood a token; a candidate that has none, or is not a number, is never the answer. */
        internal fun score(nll: Double, count: Long): Double =
            if (count > 0 && nll.isFinite()) -nll / count else Double.NEGATIVE_INFINITY
    }
}
