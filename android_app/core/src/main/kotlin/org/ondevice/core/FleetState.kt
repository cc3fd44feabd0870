package org.ondevice.core

import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest

/**
 * A fleet's adapter in whole numbers of 2^-32, and its hash: `ondevice/fleet/state.py`, bit for bit. Directions are
 * random signs.
 *
 * @property momentum in 1/256; 0 keeps no velocity.
 */
class FleetState(val size: Int, private val seed: Long, private val queries: Int, private val momentum: Int) {
    var vector = LongArray(size)
        private set
    var velocity = LongArray(if (momentum == 0) 0 else size)
        private set
    var frozen = ByteArray(32)
        private set

    /** The next round, where rounds are taken in their order. */
    var round = 0
        private set

    /** SHA-256 of the state. */
    fun digest(): ByteArray {
        val digest = MessageDigest.getInstance("SHA-256")
        digest.update(DOMAIN)
        digest.update(ByteBuffer.allocate(10).order(ByteOrder.LITTLE_ENDIAN).putLong(size.toLong()).putShort(momentum.toShort()).array())
        digest.update(frozen)
        digest.update(bytes(vector))
        digest.update(bytes(velocity))
        return digest.digest()
    }

    /** The hash as messages have it. */
    val hash: ByteArray get() = digest().copyOf(8)

    /** The adapter as sessions take it, each element rounded to the nearest. */
    fun flat() = FloatArray(size) { vector[it].toFloat() * UNIT }

    /** Take an outcome or a refresh; false if it has been taken before. Nothing changes where it does not fit. */
    fun apply(event: FleetEvent): Boolean {
        if (!event.before.contentEquals(hash)) {
            if (event.round < round || event.after.contentEquals(hash)) return false
            throw fleetError(
                "round ${event.round} does not follow on this state", "state ${Storage.hex(event.before)}", "state ${Storage.hex(hash)}",
                "take the rounds before it first",
            )
        }
        val kept = listOf(vector, velocity) to Pair(frozen, round)
        if (event.groups == null) {
            frozen = MessageDigest.getInstance("SHA-256").digest(digest() + event.digest!!)
            vector = LongArray(size)
            velocity = LongArray(velocity.size)
        } else {
            var change = change(event.groups, event.round)
            if (momentum != 0) {
                velocity = LongArray(size) { (velocity[it] * momentum shr MOMENTUM_BITS) + change[it] }
                change = velocity
            }
            vector = LongArray(size) { vector[it] - change[it] }
        }
        round = event.round + (if (event.groups == null) 0 else 1) // a refresh comes before the round whose number it has
        if (!event.after.contentEquals(hash)) {
            val received = Storage.hex(hash)
            vector = kept.first[0]
            velocity = kept.first[1]
            frozen = kept.second.first
            round = kept.second.second
            throw fleetError(
                "round ${event.round} gives another state here than on the server", "state ${Storage.hex(event.after)}", "state $received",
                "the file is damaged, or another fleet's",
            )
        }
        return true
    }

    private fun change(groups: List<FleetGroup>, round: Int): LongArray {
        val total = LongArray(size)
        for (group in groups) {
            val numbers = group.coefficients
            if (numbers.mantissas.size % queries != 0) throw fleetError("round $round: a group has no whole steps", "a multiple of $queries", numbers.mantissas.size)
            numbers.mantissas.forEachIndexed { place, mantissa ->
                val coefficient = mantissa.toLong() shl (numbers.exponent + 32)
                if (coefficient != 0L) addSigns(key(seed, group.firstStep + place / queries, (place % queries).toLong()), coefficient, total)
            }
        }
        return total
    }

    /** What [read] takes back. */
    fun toBytes(): ByteArray {
        val head = ByteBuffer.allocate(4 + 32).order(ByteOrder.LITTLE_ENDIAN).putInt(round).put(frozen).array()
        return digest() + head + bytes(vector) + bytes(velocity)
    }

    /** Take back what [toBytes] gave. */
    fun read(data: ByteArray, name: String) {
        val file = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
        val expected = ByteArray(32)
        if (data.size != 68 + 8 * (size + velocity.size)) throw fleetError("$name is damaged", "${68 + 8 * (size + velocity.size)} bytes", data.size)
        file.get(expected)
        round = file.int
        file.get(frozen)
        vector = LongArray(size) { file.long }
        velocity = LongArray(velocity.size) { file.long }
        if (!expected.contentEquals(digest())) throw fleetError("$name is damaged", hint = "take part anew, with the fleet's first file")
    }

    companion object {
        private val DOMAIN = "ondevice-fleet-state-1\u0000".toByteArray()
        private const val MOMENTUM_BITS = 8
        private const val UNIT = 1f / (1L shl 32)
        private const val GAMMA = -0x61c8864680b583ebL
        private const val STREAM = 0L

        private fun bytes(values: LongArray): ByteArray =
            ByteBuffer.allocate(8 * values.size).order(ByteOrder.LITTLE_ENDIAN).also { it.asLongBuffer().put(values) }.array()

        /** The generator's stream of a direction (`ondevice/runtime_ops/generator.py`). */
        internal fun key(seed: Long, step: Long, query: Long): Long {
            var key = mix(seed + GAMMA)
            for (counter in longArrayOf(step, query, STREAM)) key = mix(key + GAMMA * (counter + 1))
            return key
        }

        private fun mix(value: Long): Long {
            var x = (value xor (value ushr 30)) * -0x40a7b892e31b1a47L
            x = (x xor (x ushr 27)) * -0x6b2fb644ecceee15L
            return x xor (x ushr 31)
        }

        /** Add [coefficient] times the signs of a stream: element e is bit 63 - (e & 63) of word e >> 6, minus where it is set. */
        internal fun addSigns(key: Long, coefficient: Long, total: LongArray) {
            var start = 0
            while (start < total.size) {
                var word = mix(key + GAMMA * (start / 64 + 1L))
                for (element in start until minOf(start + 64, total.size)) {
                    val sign = word shr 63 // 0 or -1
                    total[element] += (coefficient xor sign) - sign
                    word = word shl 1
                }
                start += 64
            }
        }
    }
}
