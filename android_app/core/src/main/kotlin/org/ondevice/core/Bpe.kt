package org.ondevice.core

/** Ids of a word; [widths] are the bytes that each id covers. */
internal class Word(val ids: IntArray, val widths: IntArray)

/**
 * The byte-pair merges of `tokenizers`: of all pairs that can merge, the one of lowest rank, the leftmost first.
 *
 * @param tokens token of each id; null where there is none.
 * @param merges pairs of ids with what they become, by rank.
 * @param ignoreMerges a word that is a token is taken whole.
 * @param byteFallback a letter outside the vocabulary becomes `<0xXX>` tokens.
 * @param unknownId what else becomes of it; null leaves it out.
 * @param fuseUnknown neighbours become one [unknownId].
 */
internal class Bpe(
    private val vocabulary: Map<String, Int>,
    private val tokens: Array<String?>,
    merges: IntArray,
    private val ignoreMerges: Boolean,
    private val byteFallback: Boolean,
    private val unknownId: Int?,
    private val fuseUnknown: Boolean,
) {
    private val rankOf = LongIntMap(merges.size / 3)
    private val becomes = IntArray(merges.size / 3) { merges[3 * it + 2] }
    private val symbolsOf: Array<IntArray?> = Array(256) { symbols(ByteLetters.letterOf[it].toString()) }
    private val cache = HashMap<String, Word>()

    val size: Int get() = tokens.size

    init {
        for (rank in becomes.indices) rankOf[pair(merges[3 * rank], merges[3 * rank + 1])] = rank
    }

    fun idOf(token: String): Int? = vocabulary[token]

    fun tokenOf(id: Int): String? = tokens.getOrNull(id)

    /** Ids of one pre-token (as text, not letters). */
    fun encode(text: String): Word {
        synchronized(cache) { cache[text] }?.let { return it }
        val bytes = text.toByteArray(Charsets.UTF_8)
        val word = whole(bytes) ?: merge(bytes)
        if (text.length <= CACHED_LENGTH) {
            synchronized(cache) {
                if (cache.size >= CACHED_WORDS) cache.clear()
                cache[text] = word
            }
        }
        return word
    }

    private fun whole(bytes: ByteArray): Word? {
        if (!ignoreMerges) return null
        val letters = CharArray(bytes.size) { ByteLetters.letterOf[bytes[it].toInt() and 0xff] }
        val id = vocabulary[String(letters)] ?: return null
        return Word(intArrayOf(id), intArrayOf(bytes.size))
    }

    private fun symbols(letter: String): IntArray? {
        vocabulary[letter]?.let { return intArrayOf(it) }
        if (!byteFallback) return null
        val ids = letter.toByteArray(Charsets.UTF_8).map { byte ->
            val hex = Storage.hex(byteArrayOf(byte)).uppercase()
            vocabulary["<0x$hex>"] ?: return null
        }
        return ids.toIntArray()
    }

    private fun merge(bytes: ByteArray): Word {
        val first = IntList()
        val firstWidths = IntList()
        var lastUnknown = false
        for (byte in bytes) {
            val ids = symbolsOf[byte.toInt() and 0xff]
            if (ids != null) {
                for ((place, id) in ids.withIndex()) {
                    first.add(id)
                    firstWidths.add(if (place == 0) 1 else 0)
                }
            } else if (unknownId != null && !(fuseUnknown && lastUnknown)) {
                first.add(unknownId)
                firstWidths.add(1)
            }
            lastUnknown = ids == null
        }
        return mergeSymbols(first.toArray(), firstWidths.toArray())
    }

    /** Symbols are a linked list in arrays; a symbol that was merged into its left neighbour has id [GONE]. */
    private fun mergeSymbols(ids: IntArray, widths: IntArray): Word {
        val count = ids.size
        val next = IntArray(count) { it + 1 }
        val previous = IntArray(count) { it - 1 }
        val heap = LongHeap()
        fun offer(left: Int, right: Int) {
            val rank = rankOf[pair(ids[left], ids[right])]
            if (rank != LongIntMap.ABSENT) heap.push((rank.toLong() shl 32) or left.toLong())
        }
        for (left in 0 until count - 1) offer(left, left + 1)
        while (!heap.isEmpty) {
            val top = heap.pop()
            val left = (top and 0xffffffffL).toInt()
            val right = if (ids[left] == GONE) count else next[left]
            if (right >= count) continue
            val rank = rankOf[pair(ids[left], ids[right])]
            if (rank == LongIntMap.ABSENT || becomes[rank] != becomes[(top ushr 32).toInt()]) continue
            ids[left] = becomes[rank]
            widths[left] += widths[right]
            ids[right] = GONE
            next[left] = next[right]
            if (next[left] < count) previous[next[left]] = left
            if (previous[left] >= 0) offer(previous[left], left)
            if (next[left] < count) offer(left, next[left])
        }
        val kept = ids.indices.filter { ids[it] != GONE }
        return Word(IntArray(kept.size) { ids[kept[it]] }, IntArray(kept.size) { widths[kept[it]] })
    }

    private companion object {
        const val GONE = -1
        const val CACHED_WORDS = 20_000
        const val CACHED_LENGTH = 64

        fun pair(left: Int, right: Int): Long = (left.toLong() shl 32) or right.toLong()
    }
}
