package org.ondevice.core

import java.io.File

/**
 * Answers that the user judged, with what training on them needs: `ondevice/training/preferences.py` for [Kto].
 *
 * A row has two texts: its answer, and the answer of the row before (the first row's is the last one's) after its own
 * prompt. Only the first has a gradient; the second measures how far the model has moved.
 *
 * @param items encoded rows with [Item.liked].
 * @param limit longest sequence.
 */
class RatedAnswers(val items: List<Item>, private val limit: Int, private val padId: Int, val objective: Kto = Kto()) {
    private val second: List<Example> = items.indices.map { row -> mismatched(items[row], items[(row + items.size - 1) % items.size]) }
    private val liked = BooleanArray(items.size) { items[it].liked == true }

    /** Log likelihoods of both texts of each row before training. */
    private var reference: List<DoubleArray> = items.map { DoubleArray(2) }

    /**
     * Refuse answers to train on that all have the same rating.
     *
     * @throws OndeviceException [ErrorKind.DATA]: they have.
     */
    fun check() {
        if (liked.distinct().size > 1) return
        throw dataError(
            "all answers have the same rating: nothing to tell apart", "liked and disliked answers",
            "${items.size} answers, all rated ${if (liked[0]) "up" else "down"}", "judge more answers",
        )
    }

    private fun mismatched(item: Item, other: Item): Example {
        val answer = other.example.ids.drop(other.promptTokens).take(limit - 1)
        val prompt = item.example.ids.take(item.promptTokens).let { it.drop(maxOf(0, it.size + answer.size - limit)) }
        return Example.from((prompt + answer).toIntArray(), prompt.size)
    }

    /** Log likelihoods of both texts of each row under [flat]; null if stopped. */
    private fun likelihoods(session: Session, flat: FloatArray, shouldStop: () -> Boolean): List<DoubleArray>? {
        val pairs = items.mapIndexed { row, item -> Item(item.example, listOf(item.example, second[row]), 0, line = item.line) }
        val totals = Evaluator(pairs, padId).totals(session, flat, shouldStop) ?: return null
        return items.indices.map { row -> DoubleArray(2) { -totals.getValue(row to it).nll } }
    }

    /** Loss, weight of each row's negative log likelihood, and figures of the step's [rows]; [nll] is of their answers. */
    private fun weigh(session: Session, rows: List<Int>): (FloatArray) -> Weighed {
        val texts = rows.map { Item(second[it], listOf(second[it]), 0, line = items[it].line) }
        val totals = Evaluator(texts, padId).totals(session, session.adapter) { false }!!
        val others = DoubleArray(rows.size) { -totals.getValue(it to 0).nll - reference[rows[it]][1] }
        return { nll ->
            val answers = DoubleArray(rows.size) { -nll[it].toDouble() - reference[rows[it]][0] }
            val graded = objective.grade(answers, others, BooleanArray(rows.size) { liked[rows[it]] })
            Weighed(graded.loss, DoubleArray(rows.size) { -graded.coefficients[it] }, graded.figures)
        }
    }

    /** One training step on the answers of [rows], which [batch] holds. */
    internal fun step(session: Session, rows: List<Int>, batch: Batch, step: Int, rate: Double): StepResult =
        session.step(batch, step.toLong(), rate, weigh(session, rows))

    /** Judges the adapter by these rows: the loss, and the share of answers on the right side. */
    fun judge(): Judge = Judge { session, flat, shouldStop ->
        val started = System.nanoTime()
        likelihoods(session, flat, shouldStop)?.let { found ->
            val ratios = List(2) { text -> DoubleArray(items.size) { found[it][text] - reference[it][text] } }
            val graded = objective.grade(ratios[0], ratios[1], liked)
            val predictions = items.mapIndexed { row, item ->
                val gold = if (liked[row]) 0 else 1
                val rewards = List(2) { objective.beta * ratios[it][row] }
                Prediction(item.line, null, gold, if (graded.right[row]) gold else 1 - gold, rewards)
            }
            val tokens = items.indices.sumOf { (items[it].example.trainedTokens + second[it].trainedTokens).toLong() }
            EvalResult(
                graded.loss, graded.figures.getValue("accuracy"), null, items.size, tokens, (System.nanoTime() - started) / 1e9, predictions,
                graded.figures - "accuracy",
            )
        }
    }

    companion object {
        /** File of a run for its rows' log likelihoods before training. */
        const val FILE_NAME = "reference.json"

        /**
         * Take the log likelihoods of the rows of [parts] under [flat], the adapter that the run starts from, from the run's
         * folder, or compute and store them. False if stopped before that.
         *
         * @param identity of the model, the start and the rows, by what it names.
         * @param resumes the folder's run goes on, so likelihoods of something else are a mistake.
         * @throws OndeviceException [ErrorKind.CHECKPOINT]: a run that goes on has those of another model or of other rows.
         */
        internal fun begin(
            parts: List<RatedAnswers>, session: Session, flat: FloatArray, folder: File, identity: Map<String, String>, resumes: Boolean,
            shouldStop: () -> Boolean,
        ): Boolean {
            val file = File(folder, FILE_NAME)
            val stored = read(file)
            val changed = identity.keys.firstOrNull { stored[it] != identity[it] }
            if (stored.isNotEmpty() && changed != null && resumes) {
                throw OndeviceException(
                    ErrorKind.CHECKPOINT, "${file.name}: the likelihoods before training are of another $changed",
                    "$changed: ${identity[changed]}", "$changed: ${stored[changed]}", "start the run again",
                )
            }
            val known = if (changed == null) numbers(stored["log_likelihoods"], parts) else null
            val found = known ?: parts.map { it.likelihoods(session, flat, shouldStop) ?: return false }
            if (known == null) Storage.atomicWrite(file, Json.write(identity + ("log_likelihoods" to found.map { part -> part.map { it.toList() } })))
            for ((part, values) in parts.zip(found)) part.reference = values
            return true
        }

        private fun read(file: File): Map<*, *> = try {
            if (file.isFile) Json.parse(file.readText()) as? Map<*, *> ?: emptyMap<String, Any?>() else emptyMap<String, Any?>()
        } catch (_: JsonException) {
            emptyMap<String, Any?>()
        }

        /** Stored numbers, two for each row of each part; null if they are anything else. */
        private fun numbers(value: Any?, parts: List<RatedAnswers>): List<List<DoubleArray>>? {
            val lists = (value as? List<*>)?.takeIf { it.size == parts.size } ?: return null
            return lists.zip(parts).map { (list, part) ->
                val rows = (list as? List<*>)?.takeIf { it.size == part.items.size } ?: return null
                rows.map { row ->
                    val pair = (row as? List<*>)?.map { (it as? Number)?.toDouble() ?: return null }?.takeIf { it.size == 2 } ?: return null
                    pair.toDoubleArray()
                }
            }
        }
    }
}
