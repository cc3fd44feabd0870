package org.ondevice.app

import android.content.Context
import android.text.format.Formatter
import java.text.NumberFormat

/** Numbers as the phone's language writes them. */
object Words {
    fun bytes(context: Context, bytes: Long): String = Formatter.formatFileSize(context, bytes)

    fun number(value: Double, digits: Int): String = NumberFormat.getNumberInstance().apply {
        minimumFractionDigits = digits
        maximumFractionDigits = digits
    }.format(value)

    fun number(value: Int): String = NumberFormat.getIntegerInstance().format(value)

    /** Seconds as a person says them: the two largest units that are not zero. */
    fun duration(context: Context, seconds: Double): String {
        if (!seconds.isFinite() || seconds < 0) return context.getString(R.string.unknown)
        val whole = Math.round(seconds)
        val hours = (whole / 3600).toInt()
        val minutes = (whole % 3600 / 60).toInt()
        return when {
            hours > 0 -> context.getString(R.string.hours_minutes, hours, minutes)
            minutes > 0 -> context.getString(R.string.minutes_seconds, minutes, (whole % 60).toInt())
            else -> context.getString(R.string.seconds, whole.toInt())
        }
    }
}
