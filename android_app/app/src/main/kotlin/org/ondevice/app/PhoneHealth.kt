package org.ondevice.app

import android.app.ActivityManager
import android.content.ComponentCallbacks2
import android.content.Context
import android.content.Intent
import android.content.IntentFilter
import android.os.BatteryManager
import android.os.Build
import android.os.PowerManager
import android.os.SystemClock
import org.ondevice.core.Health
import org.ondevice.core.HealthSource
import org.ondevice.core.MemoryPressure
import org.ondevice.core.Meter
import java.io.File

/** What the phone says of its heat, battery, memory and storage, for the rules that pause training. */
class PhoneHealth(private val context: Context) : HealthSource {
    @Volatile private var trimmed = MemoryPressure.NONE
    @Volatile private var trimmedAtMs = 0L

    /** The system asks for memory (up to Android 13, see [measured]); it does not say when the need ends, so it counts for [TRIM_HOLDS_MS]. */
    fun onTrimMemory(level: Int) {
        val pressure = when {
            level == ComponentCallbacks2.TRIM_MEMORY_RUNNING_CRITICAL || level >= ComponentCallbacks2.TRIM_MEMORY_COMPLETE -> MemoryPressure.CRITICAL
            level == ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW || level >= ComponentCallbacks2.TRIM_MEMORY_MODERATE -> MemoryPressure.LOW
            level == ComponentCallbacks2.TRIM_MEMORY_RUNNING_MODERATE -> MemoryPressure.MODERATE
            else -> return // only the screen went away
        }
        trimmed = pressure
        trimmedAtMs = SystemClock.elapsedRealtime()
    }

    override fun now(): Health {
        val battery = context.registerReceiver(null, IntentFilter(Intent.ACTION_BATTERY_CHANGED))
        val level = battery?.getIntExtra(BatteryManager.EXTRA_LEVEL, -1) ?: -1
        val scale = battery?.getIntExtra(BatteryManager.EXTRA_SCALE, -1) ?: -1
        val tenths = battery?.getIntExtra(BatteryManager.EXTRA_TEMPERATURE, Int.MIN_VALUE) ?: Int.MIN_VALUE
        return Health(
            thermalStatus = if (Build.VERSION.SDK_INT >= 29) Thermal29.status(context) else null,
            batteryPercent = if (level >= 0 && scale > 0) level * 100 / scale else null,
            charging = (battery?.getIntExtra(BatteryManager.EXTRA_PLUGGED, 0) ?: 0) != 0,
            memoryPressure = pressure(),
            freeDiskBytes = context.filesDir.usableSpace,
            batteryCelsius = if (tenths == Int.MIN_VALUE) null else tenths / 10f,
        )
    }

    private fun pressure(): MemoryPressure {
        val info = ActivityManager.MemoryInfo()
        (context.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(info)
        val measured = measured(info)
        val told = if (SystemClock.elapsedRealtime() - trimmedAtMs < TRIM_HOLDS_MS) trimmed else MemoryPressure.NONE
        return maxOf(measured, told)
    }

    companion object {
        const val TRIM_HOLDS_MS = 60_000L

        /**
         * Pressure by what is available now. From Android 14 on the system no longer tells a running app by onTrimMemory;
         * this is asked before every step and every second of a pause. Below the threshold the system ends processes.
         */
        internal fun measured(info: ActivityManager.MemoryInfo): MemoryPressure = when {
            info.availMem < info.threshold / 2 -> MemoryPressure.CRITICAL
            info.lowMemory || info.availMem < info.threshold -> MemoryPressure.LOW
            info.availMem < info.threshold + info.threshold / 2 -> MemoryPressure.MODERATE
            else -> MemoryPressure.NONE
        }
    }
}

/** Android 10 and later tell how hot they are. */
@Since(29)
object Thermal29 {
    fun status(context: Context): Int =
        (context.getSystemService(Context.POWER_SERVICE) as PowerManager).currentThermalStatus

    /** Call [onChange] when the status changes; the returned action ends that. */
    fun listen(context: Context, onChange: () -> Unit): () -> Unit {
        val power = context.getSystemService(Context.POWER_SERVICE) as PowerManager
        val listener = PowerManager.OnThermalStatusChangedListener { onChange() }
        power.addThermalStatusListener(listener)
        return { power.removeThermalStatusListener(listener) }
    }
}

/** This process's memory as the kernel counts it. */
class ProcessMeter(private val status: File = File("/proc/self/status")) : Meter {
    override fun peakMemoryBytes(): Long = field("VmHWM:")

    override fun memoryBytes(): Long = field("VmRSS:")

    private fun field(name: String): Long {
        val line = status.bufferedReader().useLines { lines -> lines.firstOrNull { it.startsWith(name) } } ?: return 0
        return (line.filter { it.isDigit() }.toLongOrNull() ?: 0) * 1024
    }
}
