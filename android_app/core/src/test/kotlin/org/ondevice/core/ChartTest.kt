package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import kotlin.math.sin
import kotlin.random.Random

class ChartTest {
    @Test
    fun fewPointsAndNone() {
        assertTrue(Chart.of(emptyList(), 100).isEmpty)
        assertTrue(Chart.of(listOf(0 to Double.NaN, 1 to Double.POSITIVE_INFINITY), 100).isEmpty)
        val one = Chart.of(listOf(7 to 2.5), 100)
        assertEquals(listOf(2.5 to 2.5), one.columns.map { it.low to it.high })
        assertTrue(7.0 in one.xRange && 2.5 in one.yRange && one.yRange.start < one.yRange.endInclusive)
        val flat = Chart.of(listOf(0 to 0.0, 1 to 0.0), 100)
        assertTrue(flat.yTicks.size >= 2 && flat.columns.size == 2)
        val gap = Chart.of(listOf(0 to 1.0, 1 to Double.NaN, 2 to 3.0), 100)
        assertEquals(2, gap.columns.size)
    }

    /** However far it is thinned out, no extreme is lost, and a column holds exactly its own points. */
    @Test
    fun downsamplingKeepsExtremes() {
        val random = Random(3)
        repeat(50) {
            val points = List(random.nextInt(1, 3000)) { step -> step to sin(step / 30.0) + random.nextDouble() }
            val width = random.nextInt(1, 400)
            val chart = Chart.of(points, width)
            assertTrue(chart.columns.size <= width)
            assertEquals(points.minOf { it.second }, chart.columns.minOf { it.low })
            assertEquals(points.maxOf { it.second }, chart.columns.maxOf { it.high })
            assertEquals(chart.columns.map { it.x }.sorted(), chart.columns.map { it.x })
            assertTrue(chart.columns.all { it.low <= it.high && it.x in chart.xRange })
            assertTrue(chart.smooth.size <= maxOf(width, 1) && chart.smooth.all { it.second in chart.yRange })
            assertEquals(points.last().first.toDouble(), chart.smooth.last().first)
        }
    }

    @Test
    fun movingAverage() {
        val points = listOf(1.0, 3.0, 5.0, 7.0).mapIndexed { step, loss -> step to loss }
        assertEquals(listOf(1.0, 2.0, 4.0, 6.0), Chart.average(points, 2).map { it.second })
        assertEquals(listOf(1.0, 2.0, 3.0, 4.0), Chart.average(points, 10).map { it.second })
    }

    @Test
    fun ticksAreRoundNumbersInside() {
        assertEquals(listOf(0.0, 2.0, 4.0, 6.0, 8.0, 10.0), Chart.ticks(0.0, 10.0, 5))
        assertEquals(listOf(0.5, 1.0, 1.5, 2.0), Chart.ticks(0.4, 2.1, 4).map { Math.round(it * 1e9) / 1e9 })
        assertEquals(listOf(-20.0, 0.0, 20.0), Chart.ticks(-25.0, 25.0, 3))
        assertEquals(listOf(5.0), Chart.ticks(5.0, 5.0, 4))
        val random = Random(4)
        repeat(2000) {
            val low = random.nextDouble() * 1e3 - 500
            val span = Math.pow(10.0, random.nextDouble() * 12 - 6)
            val wish = random.nextInt(2, 9)
            val ticks = Chart.ticks(low, low + span, wish)
            assertTrue(ticks.size in 2..2 * wish + 3, "$low $span $wish: $ticks")
            assertTrue(ticks.all { it >= low - span * 1e-6 && it <= low + span * (1 + 1e-6) })
        }
    }
}
