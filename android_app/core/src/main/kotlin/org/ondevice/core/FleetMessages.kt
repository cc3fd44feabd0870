package org.ondevice.core

import java.nio.ByteBuffer
import java.nio.ByteOrder
import kotlin.math.abs

/** Values mantissa * 2^exponent; each mantissa in -32767..32767. */
class FleetNumbers(val mantissas: ShortArray, val exponent: Int) {
    companion object {
        const val LIMIT = 32767
        const val LOWEST = -126
        const val HIGHEST = 126

        /** Round to 15 bits of the largest among [values], halves to even; beyond [HIGHEST] they are clamped. */
        fun pack(values: DoubleArray): FleetNumbers {
            if (values.any { !it.isFinite() }) throw fleetError("a number is not finite", "finite numbers")
            val largest = values.maxOfOrNull(::abs) ?: 0.0
            var exponent = LOWEST
            if (largest > 0) {
                // getExponent: largest = m * 2^e with m in [1, 2), so 2^(e - 14) gives a mantissa below 2^15.
                exponent = (Math.getExponent(largest) - 14).coerceIn(LOWEST, HIGHEST)
                if (Math.rint(Math.scalb(largest, -exponent)) > LIMIT && exponent < HIGHEST) exponent++
            }
            val limit = LIMIT.toDouble()
            return FleetNumbers(ShortArray(values.size) { Math.rint(Math.scalb(values[it], -exponent)).coerceIn(-limit, limit).toInt().toShort() }, exponent)
        }
    }
}

/** What a server asks of a device in a round; the fields are those of `ondevice/fleet/messages.py`. */
class FleetTask(val fleet: Int, val round: Int, val begin: ByteArray, val firstStep: Long, val localSteps: Int, val learningRate: Float) {
    companion object {
        fun read(data: ByteArray): FleetTask {
            val reader = FleetReader(data, "the task", 1)
            val task = FleetTask(reader.fleet, reader.round, reader.hash(), reader.long(), reader.short(), reader.float())
            reader.end()
            if (task.localSteps == 0 || task.firstStep < 0 || !(task.learningRate.isFinite() && task.learningRate > 0)) {
                throw fleetError(
                    "the task cannot be done", "a positive number of steps, a step number below 2^63, a positive learning rate",
                    "${task.localSteps} steps from ${task.firstStep} at ${task.learningRate}",
                )
            }
            return task
        }
    }
}

/** One number a query and step, and what the device says beside them. */
class FleetAnswer(val task: FleetTask, val device: Long, val rows: Int, val loss: Float, val numbers: FleetNumbers) {
    fun toBytes(): ByteArray {
        val count = numbers.mantissas.size
        return ByteBuffer.allocate(38 + 2 * count).order(ByteOrder.LITTLE_ENDIAN)
            .put(FleetReader.MARK).put(FleetReader.VERSION).put(2).putInt(task.fleet).putInt(task.round).put(task.begin)
            .putLong(device).putInt(rows).putFloat(loss).put(numbers.exponent.toByte()).putShort(count.toShort())
            .apply { numbers.mantissas.forEach { putShort(it) } }.array()
    }
}

/** Coefficients of the directions of consecutive steps, all queries of a step before the next step's. */
class FleetGroup(val firstStep: Long, val coefficients: FleetNumbers)

/** An entry of a fleet's log. [groups] is null for a refresh, which has [digest]. */
class FleetEvent private constructor(
    val fleet: Int, val round: Int, val before: ByteArray, val after: ByteArray, val groups: List<FleetGroup>?, val digest: ByteArray?,
) {
    companion object {
        private const val UNIT = -32
        private const val LARGEST_UNIT = -17
        private const val MOST_DIRECTIONS = 1 shl 20

        fun read(data: ByteArray): FleetEvent {
            if (data.size > 2 && data[2].toInt() == 4) {
                val reader = FleetReader(data, "the refresh", 4)
                return FleetEvent(reader.fleet, reader.round, reader.hash(), reader.hash(), null, reader.bytes(32)).also { reader.end() }
            }
            val reader = FleetReader(data, "the outcome", 3)
            val (before, after) = List(2) { reader.hash() }
            var directions = 0
            val groups = List(reader.short()) {
                val step = reader.long()
                val numbers = reader.numbers(UNIT, LARGEST_UNIT)
                directions += numbers.mantissas.size
                if (step < 0 || directions > MOST_DIRECTIONS) throw fleetError("the outcome is larger than any fleet's", received = "$directions directions")
                FleetGroup(step, numbers)
            }
            reader.end()
            return FleetEvent(reader.fleet, reader.round, before, after, groups, null)
        }
    }
}

/** Takes fields from the front of a message, which begins with mark, version, [kind], fleet and round. */
internal class FleetReader(data: ByteArray, private val what: String, kind: Int) {
    private val left = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
    val fleet: Int
    val round: Int

    init {
        val mark = need(1).get()
        if (mark != MARK) throw fleetError("this is no message of a fleet: $what")
        val version = need(1).get()
        if (version != VERSION) throw fleetError("$what is of another version", "version $VERSION", "version $version", "use the same version of ondevice on every device")
        if (need(1).get().toInt() != kind) throw fleetError("this message is no ${what.substringAfterLast(' ')}")
        fleet = need(4).int
        round = need(4).int
    }

    fun hash() = bytes(8)
    fun bytes(count: Int) = ByteArray(count).also { need(count).get(it) }
    fun long() = need(8).long
    fun short() = need(2).short.toInt() and 0xffff
    fun float() = need(4).float

    fun numbers(lowest: Int, highest: Int): FleetNumbers {
        val exponent = need(1).get().toInt()
        val count = short()
        if (count !in 1..MOST_NUMBERS) throw fleetError("$what has $count numbers", "1 to $MOST_NUMBERS", count)
        if (exponent !in lowest..highest) throw fleetError("$what: exponent", "$lowest to $highest", exponent)
        val mantissas = ShortArray(count) { need(2).short }
        if (mantissas.any { it == Short.MIN_VALUE }) throw fleetError("$what: a number is out of range", "-32767 to 32767", -32768)
        return FleetNumbers(mantissas, exponent)
    }

    fun end() {
        if (left.hasRemaining()) throw fleetError("$what is too long", "${left.position()} bytes", left.limit())
    }

    private fun need(count: Int): ByteBuffer {
        if (left.remaining() < count) throw fleetError("$what is cut off", "${left.position() + count} bytes or more", left.limit())
        return left
    }

    companion object {
        const val MARK = 0xD7.toByte()
        const val VERSION: Byte = 1
        private const val MOST_NUMBERS = 4096
    }
}

internal fun fleetError(what: String, expected: Any? = null, received: Any? = null, hint: String? = null) =
    OndeviceException(ErrorKind.FLEET, what, expected?.toString(), received?.toString(), hint)
