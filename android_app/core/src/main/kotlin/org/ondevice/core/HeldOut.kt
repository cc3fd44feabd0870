package org.ondevice.core

/**
 * Rows that are kept back to judge an adapter before and after: drawn by the seed, so that a file sorted by its labels
 * is judged on all of them, and the same rows after every restart.
 */
object HeldOut {
    private const val FROM_ROWS = 20
    private const val SHARE = 10
    private const val AT_MOST = 32

    /** How many: from 20 rows on a tenth of them, at most 32. */
    fun count(rows: Int): Int = if (rows < FROM_ROWS) 0 else minOf(AT_MOST, rows / SHARE)

    /**
     * Indices of the rows kept back, ascending: the first of the stable argsort of raw words of numpy's PCG64 seeded with
     * (seed, 0, 1), which is no epoch's order.
     */
    fun rows(rows: Int, seed: Long): Set<Int> =
        Batches.order(rows, longArrayOf(seed, 0, 1)).take(count(rows)).toSortedSet()

    /** What is trained on, and what is kept back; both in the order of the file. */
    fun split(items: List<Item>, seed: Long): Pair<List<Item>, List<Item>> {
        val kept = rows(items.size, seed)
        return items.filterIndexed { index, _ -> index !in kept } to items.filterIndexed { index, _ -> index in kept }
    }
}
