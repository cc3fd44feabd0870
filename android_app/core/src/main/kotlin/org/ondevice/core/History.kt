package org.ondevice.core

/** Losses, times and memory of every step, the parts before a resume included. */
internal class History {
    private val losses = ArrayList<Double>()
    private val times = ArrayList<Double>()
    private var tokens = 0L
    var peakMemoryBytes = 0L
        private set

    fun add(loss: Double, timeS: Double, tokens: Int, peakMemoryBytes: Long) {
        losses.add(loss)
        times.add(timeS)
        this.tokens += tokens
        this.peakMemoryBytes = maxOf(this.peakMemoryBytes, peakMemoryBytes)
    }

    fun add(entry: LogContent.Entry) = add(
        entry.number("loss") ?: Double.NaN, entry.number("step_time_s") ?: 0.0,
        entry.number("tokens")?.toInt() ?: 0, entry.number("peak_memory_bytes")?.toLong() ?: 0L,
    )

    val firstLoss: Double get() = losses.firstOrNull() ?: Double.NaN

    /** Mean loss of the last tenth of the steps (at least one): single zeroth-order losses are noisy. */
    val finalLoss: Double get() = losses.takeLast(maxOf(1, losses.size / 10)).let { if (it.isEmpty()) Double.NaN else it.average() }

    /** Median seconds of a step. */
    val stepTimeS: Double get() = if (times.isEmpty()) 0.0 else median(times)

    val tokensPerS: Double get() = times.sum().let { if (it > 0) tokens / it else 0.0 }

    /** Seconds for [left] more steps, from the median of the last steps and the one that just ran. */
    fun etaS(stepTimeS: Double, left: Int): Double = median(times.takeLast(RECENT) + stepTimeS) * left

    private fun median(values: List<Double>): Double {
        val sorted = values.sorted()
        val middle = sorted.size / 2
        return if (sorted.size % 2 == 1) sorted[middle] else (sorted[middle - 1] + sorted[middle]) / 2
    }

    private companion object {
        const val RECENT = 20
    }
}
