package org.ondevice.core

/** Sums as numpy takes them, for losses that equal Python's bit for bit. */
internal object Means {
    /** The mean as numpy takes it: float32 sums, in eight lanes from eight elements on (up to 128). */
    fun mean(values: FloatArray): Float = sum(values, 0, values.size) / values.size

    private fun sum(values: FloatArray, from: Int, count: Int): Float {
        if (count < 8) {
            var total = -0.0f
            for (index in from until from + count) total += values[index]
            return total
        }
        if (count > 128) {
            val half = (count / 2) - (count / 2) % 8
            return sum(values, from, half) + sum(values, from + half, count - half)
        }
        val lanes = FloatArray(8) { values[from + it] }
        var index = 8
        while (index < count - count % 8) {
            for (lane in 0 until 8) lanes[lane] += values[from + index + lane]
            index += 8
        }
        var total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
        while (index < count) total += values[from + index++]
        return total
    }

    /** The mean of float64 values; their sum is taken as in the other. */
    fun mean(values: DoubleArray): Double = sum(values, 0, values.size) / values.size

    private fun sum(values: DoubleArray, from: Int, count: Int): Double {
        if (count < 8) return (from until from + count).fold(-0.0) { total, index -> total + values[index] }
        if (count > 128) {
            val half = (count / 2) - (count / 2) % 8
            return sum(values, from, half) + sum(values, from + half, count - half)
        }
        val lanes = DoubleArray(8) { values[from + it] }
        val whole = count - count % 8
        for (index in 8 until whole) lanes[index % 8] += values[from + index]
        val total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
        return (from + whole until from + count).fold(total) { sum, index -> sum + values[index] }
    }

    /** float32 sums as in [mean]. */
    fun sum(values: FloatArray): Float = sum(values, 0, values.size)
}
