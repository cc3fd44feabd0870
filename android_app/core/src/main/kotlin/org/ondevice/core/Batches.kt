package org.ondevice.core

/**
 * Endless batches of constant size in an order that is new every epoch: the batches of
 * `ondevice/data/batching.py`, row for row. A pure function of the seed and the step, so a resume needs only the step.
 *
 * Row p of the run (p = step * batchSize + position) is row p mod n of epoch p div n. An epoch's order is the
 * stable argsort of n words of [Pcg64] seeded with (seed, epoch).
 *
 * @param examples what is trained on.
 * @param lengthsTokens padded lengths of the program; the smallest that holds a batch's longest row is taken.
 * @param seed 0 or above.
 * @param padId the id on padded positions.
 */
class Batches(
    private val examples: List<Example>,
    private val batchSize: Int,
    lengthsTokens: List<Int>,
    private val seed: Long,
    private val padId: Int,
) {
    /** Sequences that an epoch has. */
    val sequences: Int get() = examples.size

    private val lengths = lengthsTokens.sorted()
    private val orders = HashMap<Long, IntArray>()

    init {
        if (examples.isEmpty()) throw dataError("there are no rows to train on", "one row or more", "none", "add examples")
        if (batchSize < 1 || seed < 0) {
            throw configError("batch_size or seed is out of range", "batch_size >= 1, seed >= 0", "batch_size=$batchSize, seed=$seed")
        }
        val longest = examples.maxOf { it.size }
        if (longest > lengths.last()) {
            throw configError("a row is longer than the program's largest length", "a length among $lengths", longest)
        }
    }

    /** Batches in which every row is seen once; not whole if the last one is shared. */
    val stepsPerEpoch: Double get() = examples.size.toDouble() / batchSize

    /** Indices of the rows of a step, counted from 0. */
    fun rowsAt(step: Int): List<Int> {
        require(step >= 0) { "a step is counted from 0, not $step" }
        val first = step.toLong() * batchSize
        return (first until first + batchSize).map { order(it / examples.size)[(it % examples.size).toInt()] }
    }

    /** The batch of a step, counted from 0. */
    fun at(step: Int): Batch {
        val chosen = rowsAt(step).map { examples[it] }
        val longest = chosen.maxOf { it.size }
        return Batch.pad(chosen, lengths.first { it >= longest }, padId)
    }

    private fun order(epoch: Long): IntArray {
        orders[epoch]?.let { return it }
        orders.keys.removeAll { it < epoch - 1 || it > epoch + 1 }
        return order(examples.size, longArrayOf(seed, epoch)).also { orders[epoch] = it }
    }

    internal companion object {
        /** The stable argsort of [count] raw words of numpy's PCG64 seeded with [entropy]. */
        fun order(count: Int, entropy: LongArray): IntArray {
            val generator = Pcg64(entropy)
            val words = LongArray(count) { generator.next() xor Long.MIN_VALUE }
            return words.indices.sortedWith { left, right -> words[left].compareTo(words[right]) }.toIntArray()
        }
    }
}
