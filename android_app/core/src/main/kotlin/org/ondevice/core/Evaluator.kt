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
    )
}

/**
 * Runs the program's `evaluate` over encoded rows. A row with candidates is scored once for each; the candidate
 * with the highest mean log likelihood a token is the answer. The program's batch is always filled; the last one
 * is padded with copies that are not counted.
 */
class Evaluator(private val items: List<Item>, private val padId: Int) {
    init {
        if (items.isEmpty()) throw dataError("there are no rows to evaluate", "one row or more", "none", "choose data for evaluation")
    }

    /**
     * @param flat the adapter to judge; the session's unless given.
     * @param shouldStop asked before every batch; the evaluation is given up with null if it says yes.
     */
    fun run(session: Session, flat: FloatArray = session.adapter, shouldStop: () -> Boolean = { false }): EvalResult? {
        val started = System.nanoTime()
        val jobs = items.flatMapIndexed { index, item -> slots(item).map { (slot, example) -> Job(index, slot, example) } }
            .sortedByDescending { it.example.size }
        val nll = HashMap<Pair<Int, Int>, Double>()
        val counts = HashMap<Pair<Int, Int>, Long>()
        val size = session.manifest.evalBatchSize
        for (part in jobs.chunked(size)) {
            if (shouldStop()) return null
            val losses = session.evaluate(batch(session.manifest, part, size), flat)
            for ((row, job) in part.withIndex()) {
                nll[job.item to job.slot] = losses.nll[row].toDouble()
                counts[job.item to job.slot] = losses.tokens[row]
            }
        }
        var goldNll = 0.0
        var goldTokens = 0L
        val predictions = items.mapIndexed { index, item ->
            val key = index to (item.gold ?: -1)
            val sum = nll.getValue(key)
            val count = counts.getValue(key)
            goldNll += sum
            goldTokens += count
            val scores = item.candidates.indices.map { score(nll.getValue(index to it), counts.getValue(index to it)) }
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
