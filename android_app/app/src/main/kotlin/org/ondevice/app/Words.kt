package org.ondevice.app

import android.content.Context
import android.text.format.Formatter
import org.ondevice.core.MemoryPressure
import org.ondevice.core.PauseCause
import org.ondevice.core.PauseReason
import java.text.NumberFormat

/** Numbers as the phone's language writes them. */
object Words {
    fun bytes(context: Context, bytes: Long): String = Formatter.formatFileSize(context, bytes)

    fun number(value: Double, digits: Int): String = NumberFormat.getNumberInstance().apply {
        minimumFractionDigits = digits
        maximumFractionDigits = digits
    }.format(value)

    fun number(value: Int): String = NumberFormat.getIntegerInstance().format(value)

    /** Why training is paused, and when it goes on. */
    fun reason(context: Context, reason: PauseReason): String = when (reason.cause) {
        PauseCause.USER -> context.getString(R.string.reason_user)
        PauseCause.HEAT -> context.getString(R.string.reason_heat, thermal(context, reason.measured as Int), thermal(context, reason.limit as Int))
        PauseCause.BATTERY -> context.getString(R.string.reason_battery, reason.measured, reason.limit)
        PauseCause.NOT_CHARGING -> context.getString(R.string.reason_charger)
        PauseCause.MEMORY -> context.getString(R.string.reason_memory, pressure(context, reason.measured), pressure(context, reason.limit))
        PauseCause.DISK -> context.getString(R.string.reason_disk, bytes(context, reason.measured as Long), bytes(context, reason.limit as Long))
    }

    /** Android's thermal status; a number that it does not define yet is shown as it is. */
    fun thermal(context: Context, status: Int): String = context.resources.getStringArray(R.array.thermal).getOrElse(status) { "$status" }

    private fun pressure(context: Context, level: Any?): String = context.resources.getStringArray(R.array.pressure)[(level as MemoryPressure).ordinal]

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
