package org.ondevice.app

import android.content.Context
import android.graphics.Canvas
import android.graphics.Paint
import android.graphics.Path
import android.view.View
import org.ondevice.core.Chart
import kotlin.math.floor
import kotlin.math.log10

/** The loss over the steps: each step's loss pale, its moving average strong. Time runs left to right in every language. */
class ChartView(context: Context) : View(context) {
    private val ui = Ui(context)
    private val line = paint(R.color.chart_line, 2.5f)
    private val pale = paint(R.color.chart_soft, 1.5f)
    private val grid = paint(R.color.outline, 1f)
    private val ink = Paint(Paint.ANTI_ALIAS_FLAG).apply {
        color = ui.color(R.color.text_soft)
        textSize = ui.sp(11f)
    }
    private var points: List<Pair<Int, Double>> = emptyList()

    init {
        minimumHeight = ui.dp(180)
    }

    /** Show the losses of steps counted from 0; people count them from 1. */
    fun show(points: List<Pair<Int, Double>>) {
        this.points = points.map { (step, loss) -> step + 1 to loss }
        contentDescription = describe()
        invalidate()
    }

    private fun describe(): String {
        val last = points.lastOrNull() ?: return context.getString(R.string.chart_empty)
        val smooth = Chart.of(points, 1).smooth.lastOrNull()?.second ?: last.second
        return context.getString(R.string.chart_words, Words.number(last.first), Words.number(points[0].second, 3), Words.number(smooth, 3))
    }

    private fun paint(color: Int, width: Float) = Paint(Paint.ANTI_ALIAS_FLAG).apply {
        this.color = ui.color(color)
        style = Paint.Style.STROKE
        strokeWidth = width * context.resources.displayMetrics.density
        strokeJoin = Paint.Join.ROUND
        strokeCap = Paint.Cap.ROUND
    }

    override fun onMeasure(width: Int, height: Int) =
        setMeasuredDimension(getDefaultSize(suggestedMinimumWidth, width), resolveSize(ui.dp(180), height))

    override fun onDraw(canvas: Canvas) {
        if (points.isEmpty()) {
            ink.textAlign = Paint.Align.CENTER
            canvas.drawText(context.getString(R.string.chart_empty), width / 2f, height / 2f, ink)
            return
        }
        val chart = Chart.of(points, maxOf(1, width / 3))
        val digits = digits(chart.yTicks)
        val left = chart.yTicks.maxOf { ink.measureText(Words.number(it, digits)) } + ui.dp(8)
        val right = width - ui.dp(6).toFloat()
        val ceiling = ui.dp(8).toFloat()
        val ground = height - ui.dp(24).toFloat()
        val x = { value: Double -> left + (right - left) * share(value, chart.xRange) }
        val y = { value: Double -> ground - (ground - ceiling) * share(value, chart.yRange) }

        ink.textAlign = Paint.Align.RIGHT
        for (value in chart.yTicks) {
            canvas.drawLine(left, y(value), right, y(value), grid)
            canvas.drawText(Words.number(value, digits), left - ui.dp(6), y(value) + ink.textSize / 3, ink)
        }
        for (value in chart.xTicks.filter { it == floor(it) && it >= 1 }) {
            val label = Words.number(value.toInt())
            val half = ink.measureText(label) / 2
            ink.textAlign = Paint.Align.CENTER
            canvas.drawText(label, x(value).coerceIn(left + half, right - half), height - ui.dp(6).toFloat(), ink)
        }
        val each = Path()
        for (column in chart.columns) {
            if (each.isEmpty) each.moveTo(x(column.x), y(column.high)) else each.lineTo(x(column.x), y(column.high))
            each.lineTo(x(column.x), y(column.low))
        }
        canvas.drawPath(each, pale)
        val smooth = Path()
        for ((step, loss) in chart.smooth) if (smooth.isEmpty) smooth.moveTo(x(step), y(loss)) else smooth.lineTo(x(step), y(loss))
        canvas.drawPath(smooth, line)
        if (points.size == 1) canvas.drawPoint(x(points[0].first.toDouble()), y(points[0].second), line)
    }

    private fun share(value: Double, range: ClosedFloatingPointRange<Double>): Float =
        ((value - range.start) / (range.endInclusive - range.start)).toFloat()

    /** Enough digits to tell two marks apart. */
    private fun digits(ticks: List<Double>): Int =
        if (ticks.size < 2) 2 else maxOf(0, -floor(log10(ticks[1] - ticks[0]) + 1e-9).toInt())
}
