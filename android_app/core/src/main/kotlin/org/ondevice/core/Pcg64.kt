package org.ondevice.core

/**
 * Numpy's PCG64 (O'Neill, PCG XSL-RR 128/64) behind numpy's SeedSequence: the same raw words as
 * `np.random.PCG64(np.random.SeedSequence(entropy))`, which numpy promises never to change.
 *
 * @param entropy integers, 0 or above.
 */
internal class Pcg64(entropy: LongArray) {
    private var high = 0L
    private var low = 0L
    private val incrementHigh: Long
    private val incrementLow: Long

    init {
        val state = seedWords(entropy)
        incrementHigh = (state[2] shl 1) or (state[3] ushr 63)
        incrementLow = (state[3] shl 1) or 1L
        advance()
        add(state[0], state[1])
        advance()
    }

    /** The next 64 bits. */
    fun next(): Long {
        advance()
        return java.lang.Long.rotateRight(high xor low, (high ushr 58).toInt())
    }

    /** state = state * multiplier + increment, modulo 2^128. */
    private fun advance() {
        val product = multiplyHigh(low, MULTIPLIER_LOW) + high * MULTIPLIER_LOW + low * MULTIPLIER_HIGH
        low *= MULTIPLIER_LOW
        high = product
        add(incrementHigh, incrementLow)
    }

    private fun add(addHigh: Long, addLow: Long) {
        val sum = low + addLow
        val carry = if (java.lang.Long.compareUnsigned(sum, low) < 0) 1L else 0L
        low = sum
        high += addHigh + carry
    }

    private companion object {
        const val MULTIPLIER_HIGH = 0x2360ED051FC65DA4L
        const val MULTIPLIER_LOW = 0x4385DF649FCCF645L
        const val POOL = 4

        /** Upper 64 bits of an unsigned product. */
        fun multiplyHigh(x: Long, y: Long): Long {
            val mask = 0xffffffffL
            val xLow = x and mask
            val xHigh = x ushr 32
            val yLow = y and mask
            val yHigh = y ushr 32
            val middle = xHigh * yLow + ((xLow * yLow) ushr 32)
            val other = xLow * yHigh + (middle and mask)
            return xHigh * yHigh + (middle ushr 32) + (other ushr 32)
        }

        /** Four 64-bit words of SeedSequence's pool. */
        fun seedWords(entropy: LongArray): LongArray {
            val words = ArrayList<Int>()
            for (value in entropy) {
                require(value >= 0) { "entropy is 0 or above, not $value" }
                words.add(value.toInt())
                if (value ushr 32 != 0L) words.add((value ushr 32).toInt())
            }
            val hash = Hash(0x43b0d7e5, 0x931e8875.toInt())
            val pool = IntArray(POOL) { hash.mix(words.getOrElse(it) { 0 }) }
            for (source in 0 until POOL) {
                for (target in 0 until POOL) if (source != target) pool[target] = mix(pool[target], hash.mix(pool[source]))
            }
            for (source in POOL until words.size) {
                for (target in 0 until POOL) pool[target] = mix(pool[target], hash.mix(words[source]))
            }
            val out = Hash(0x8b51f9dd.toInt(), 0x58f38ded)
            val halves = IntArray(2 * POOL) { out.mix(pool[it % POOL]) }
            return LongArray(POOL) { (halves[2 * it].toLong() and 0xffffffffL) or (halves[2 * it + 1].toLong() shl 32) }
        }

        fun mix(x: Int, y: Int): Int {
            val result = 0xca01f9dd.toInt() * x - 0x4973f715 * y
            return result xor (result ushr 16)
        }
    }

    /** SeedSequence's running hash. */
    private class Hash(private var constant: Int, private val multiplier: Int) {
        fun mix(value: Int): Int {
            val first = value xor constant
            constant *= multiplier
            val second = first * constant
            return second xor (second ushr 16)
        }
    }
}
