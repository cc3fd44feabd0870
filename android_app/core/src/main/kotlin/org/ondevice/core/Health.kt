package org.ondevice.core

/** Android's thermal status (`PowerManager.getCurrentThermalStatus`), 0 to 6. */
object Thermal {
    const val NONE = 0
    const val LIGHT = 1
    const val MODERATE = 2
    const val SEVERE = 3
    const val CRITICAL = 4
    const val EMERGENCY = 5
    const val SHUTDOWN = 6

    /** The status in words; a number that Android does not define yet is shown as it is. */
    fun word(status: Int): String =
        arrayOf("none", "light", "moderate", "severe", "critical", "emergency", "shutdown").getOrElse(status) { "$status" }
}

/** How short the system's memory is, from `ComponentCallbacks2.onTrimMemory` or `ActivityManager.MemoryInfo`. */
enum class MemoryPressure { NONE, MODERATE, LOW, CRITICAL }

/**
 * What the phone says of itself at one moment.
 *
 * @property thermalStatus 0 to 6 ([Thermal]); null where the system does not tell (before Android 10).
 * @property batteryPercent 0 to 100; null without a battery.
 * @property charging whether a charger is connected and charges or has charged the battery.
 * @property freeDiskBytes free bytes where checkpoints are written; null if unknown.
 * @property batteryCelsius for display only; null if unknown.
 */
data class Health(
    val thermalStatus: Int? = null,
    val batteryPercent: Int? = null,
    val charging: Boolean = false,
    val memoryPressure: MemoryPressure = MemoryPressure.NONE,
    val freeDiskBytes: Long? = null,
    val batteryCelsius: Float? = null,
)

/** Where [Health] comes from: the phone in the app, a list of snapshots in a test. */
fun interface HealthSource {
    fun now(): Health
}

/**
 * Memory of this process in bytes, for events; the app reads `Debug.MemoryInfo`, tests read `/proc/self/status`.
 */
interface Meter {
    /** Highest resident memory since the run began. */
    fun peakMemoryBytes(): Long

    /** Resident memory now. */
    fun memoryBytes(): Long = peakMemoryBytes()
}
