package org.ondevice.core

/** The label of a token that is not trained on. */
const val IGNORE = -100

/** One sequence: `labels[t]` is `ids[t]` where token t is trained on, else [IGNORE]; the program shifts. */
class Example(val ids: IntArray, val labels: IntArray) {
    val size: Int get() = ids.size

    /** Targets that count towards the loss: labels other than [IGNORE], without the first position. */
    val trainedTokens: Int get() = labels.indices.count { it > 0 && labels[it] != IGNORE }

    internal companion object {
        /** Labels from [start] on. */
        fun from(ids: IntArray, start: Int) = Example(ids, IntArray(ids.size) { if (it < start) IGNORE else ids[it] })
    }
}

/**
 * One row, encoded: what is trained on, and what it is judged by.
 *
 * @property candidates one for each class or choice, answer tokens labelled; empty where there is nothing to choose.
 * @property gold index of the right candidate.
 * @property answers candidates' answers as text, in the order of [candidates].
 * @property line line of the data file, from 1.
 * @property promptTokens tokens before the answer: what a model continues when it answers.
 * @property droppedTokens tokens cut from the front of the prompt to fit.
 * @property liked of a rated answer, whether it was liked; null for other rows.
 */
class Item(
    val example: Example,
    val candidates: List<Example> = emptyList(),
    val gold: Int? = null,
    val answers: List<String> = emptyList(),
    val line: Int = 0,
    val promptTokens: Int = 0,
    val droppedTokens: Int = 0,
    val liked: Boolean? = null,
)

/** Encoded rows, every row left out by the reader and the encoder, and what framed the prompts. */
class Dataset(
    val items: List<Item>,
    val problems: List<RowProblem>,
    val format: Format,
    val maxLengthTokens: Int,
    val tooLong: Int,
    val template: String,
) {
    /** Rows that lost tokens at the front of their prompt. */
    val truncated: Int get() = items.count { it.droppedTokens > 0 }
}

/** Rows padded on the right: `ids` and `labels`, int64 [rows, lengthTokens] row-major. */
class Batch(val rows: Int, val lengthTokens: Int, val ids: LongArray, val labels: LongArray) {
    /** The whole batch [times] times, one below the other. */
    fun repeated(times: Int): Batch = if (times == 1) this else Batch(
        rows * times, lengthTokens, LongArray(ids.size * times) { ids[it % ids.size] }, LongArray(labels.size * times) { labels[it % labels.size] },
    )

    companion object {
        /** Examples as one batch of [lengthTokens] columns. */
        fun pad(examples: List<Example>, lengthTokens: Int, padId: Int): Batch {
            val longest = examples.maxOfOrNull { it.size } ?: 0
            if (longest > lengthTokens) {
                throw configError("an example does not fit into the batch", "at most $lengthTokens tokens", longest)
            }
            val ids = LongArray(examples.size * lengthTokens) { padId.toLong() }
            val labels = LongArray(examples.size * lengthTokens) { IGNORE.toLong() }
            for ((row, example) in examples.withIndex()) {
                for (index in 0 until example.size) {
                    ids[row * lengthTokens + index] = example.ids[index].toLong()
                    labels[row * lengthTokens + index] = example.labels[index].toLong()
                }
            }
            return Batch(examples.size, lengthTokens, ids, labels)
        }
    }
}
