package org.ondevice.core

import kotlin.math.abs
import kotlin.math.floor
import kotlin.math.log10
import kotlin.math.pow

/** One pixel column of a chart: lowest and highest value of the points that fall on it. */
class Column(val x: Double, val low: Double, val high: Double)

/**
 * What a loss chart draws.
 *
 * @property columns one for each pixel column that has points, left to right; minimum and maximum are kept.
 * @property smooth a moving average, as (x, y) points of finite values.
 * @property xTicks, yTicks round numbers inside the ranges.
 */
class Chart(
    val columns: List<Column>,
    val smooth: List<Pair<Double, Double>>,
    val xRange: ClosedFloatingPointRange<Double>,
    val yRange: ClosedFloatingPointRange<Double>,
    val xTicks: List<Double>,
    val yTicks: List<Double>,
) {
    val isEmpty: Boolean get() = columns.isEmpty()

    companion object {
        /**
         * @param points (step, loss) in ascending steps; values that are no numbers are left out.
         * @param widthPixels pixel columns to fill.
         * @param window points of the moving average (those up to each point).
         * @param ticks about how many marks an axis gets.
         */
        fun of(points: List<Pair<Int, Double>>, widthPixels: Int, window: Int = 20, ticks: Int = 5): Chart {
            require(widthPixels >= 1 && window >= 1 && ticks >= 2) { "widthPixels and window are at least 1, ticks at least 2" }
            val finite = points.filter { it.second.isFinite() }
            if (finite.isEmpty()) return Chart(emptyList(), emptyList(), 0.0..1.0, 0.0..1.0, ticks(0.0, 1.0, ticks), ticks(0.0, 1.0, ticks))
            val xRange = widen(finite.first().first.toDouble(), finite.last().first.toDouble())
            val yRange = widen(finite.minOf { it.second }, finite.maxOf { it.second })
            val smooth = average(finite, window)
            return Chart(
                downsample(finite, xRange, widthPixels), thin(smooth, widthPixels), xRange, yRange,
                ticks(xRange.start, xRange.endInclusive, ticks), ticks(yRange.start, yRange.endInclusive, ticks),
            )
        }

        /** The mean of each point and up to `window - 1` before it. */
        fun average(points: List<Pair<Int, Double>>, window: Int): List<Pair<Double, Double>> {
            var sum = 0.0
            return points.indices.map { index ->
                sum += points[index].second
                if (index >= window) sum -= points[index - window].second
                points[index].first.toDouble() to sum / minOf(index + 1, window)
            }
        }

        /** Multiples of 1, 2 or 5 times a power of ten inside [low]..[high], about [wish] of them. */
        fun ticks(low: Double, high: Double, wish: Int): List<Double> {
            val span = high - low
            if (!(span > 0 && span.isFinite())) return listOf(low)
            val rough = span / wish
            val power = 10.0.pow(floor(log10(rough)))
            val steps = listOf(0.5, 1.0, 2.0, 5.0, 10.0).map { it * power }
            val wished = steps.indexOfFirst { it >= rough * 0.999_999 }
            return multiples(low, high, steps[wished]).takeIf { it.size >= 2 } ?: multiples(low, high, steps[wished - 1])
        }

        private fun multiples(low: Double, high: Double, step: Double): List<Double> {
            val first = Math.ceil(low / step - 1e-9).toLong()
            return generateSequence(first) { it + 1 }.map { it * step }.takeWhile { it <= high + step * 1e-9 }
                .map { if (abs(it) < step * 1e-9) 0.0 else it }.toList()
        }

        private fun widen(low: Double, high: Double): ClosedFloatingPointRange<Double> {
            if (high > low) return low..high
            val margin = if (low == 0.0) 1.0 else abs(low) * 0.1
            return low - margin..low + margin
        }

        private fun downsample(points: List<Pair<Int, Double>>, range: ClosedFloatingPointRange<Double>, width: Int): List<Column> {
            val span = range.endInclusive - range.start
            return points.groupBy { (((it.first - range.start) / span) * width).toInt().coerceIn(0, width - 1) }
                .toSortedMap().map { (_, found) ->
                    Column(found.sumOf { it.first.toDouble() } / found.size, found.minOf { it.second }, found.maxOf { it.second })
                }
        }

        private fun thin(points: List<Pair<Double, Double>>, width: Int): List<Pair<Double, Double>> {
            if (points.size <= width) return points
            return (0 until width).map { points[((it.toLong() + 1) * points.size / width - 1).toInt()] }
        }
    }
}
