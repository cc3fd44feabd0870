package org.ondevice.core

/**
 * The rules that the user sees and sets.
 *
 * @property pauseAtThermal pause from this thermal status on ([Thermal]).
 * @property resumeBelowThermal once paused for heat, go on only below this status; at most [pauseAtThermal].
 * @property batteryFloorPercent pause below this charge while not charging; 0 turns the rule off.
 * @property batteryResumePercent once paused for charge, go on from here (or when charging).
 * @property onlyWhileCharging train only with a charger connected.
 * @property pauseAtMemory pause from this pressure on; null turns the rule off.
 * @property diskFloorBytes pause when less is free: a checkpoint would not fit.
 */
data class Rules(
    val pauseAtThermal: Int = Thermal.SEVERE,
    val resumeBelowThermal: Int = Thermal.MODERATE,
    val batteryFloorPercent: Int = 20,
    val batteryResumePercent: Int = 25,
    val onlyWhileCharging: Boolean = false,
    val pauseAtMemory: MemoryPressure? = MemoryPressure.LOW,
    val diskFloorBytes: Long = 64L shl 20,
) {
    init {
        require(pauseAtThermal in Thermal.LIGHT..Thermal.SHUTDOWN) { "pauseAtThermal is 1 to 6, not $pauseAtThermal" }
        require(resumeBelowThermal in 1..pauseAtThermal) { "resumeBelowThermal is 1 to $pauseAtThermal, not $resumeBelowThermal" }
        require(batteryFloorPercent in 0..100) { "batteryFloorPercent is 0 to 100, not $batteryFloorPercent" }
        require(batteryResumePercent in batteryFloorPercent..100) {
            "batteryResumePercent is $batteryFloorPercent to 100, not $batteryResumePercent"
        }
        require(diskFloorBytes >= 0) { "diskFloorBytes is 0 or more, not $diskFloorBytes" }
    }
}

/** Why training pauses. */
enum class PauseCause { USER, HEAT, BATTERY, NOT_CHARGING, MEMORY, DISK }

/**
 * One reason: what was measured and when training goes on. Two reasons are the same when their causes are.
 *
 * @property words in English, for the log.
 * @property measured what was measured, for a screen's own language: thermal status, percent, [MemoryPressure] or bytes.
 * @property limit where training goes on, in the unit of [measured]; null where there is no number.
 */
class PauseReason(val cause: PauseCause, val words: String, val measured: Any? = null, val limit: Any? = null) {
    override fun equals(other: Any?): Boolean = other is PauseReason && other.cause == cause

    override fun hashCode(): Int = cause.hashCode()

    override fun toString(): String = words
}

/** Which rules a moment breaks: a pure function, with the hysteresis of what training is paused for already. */
object PauseRules {
    /**
     * @param pausedFor causes that hold training now; heat, charge and memory must get better than where they stopped it.
     * @return reasons to be paused, in the order of [PauseCause]; empty when training may run. Never [PauseCause.USER].
     */
    fun reasons(health: Health, rules: Rules, pausedFor: Set<PauseCause> = emptySet()): Set<PauseReason> {
        val found = linkedSetOf<PauseReason>()
        fun add(cause: PauseCause, words: String, measured: Any? = null, limit: Any? = null) = found.add(PauseReason(cause, words, measured, limit))

        health.thermalStatus?.let { status ->
            val limit = if (PauseCause.HEAT in pausedFor) rules.resumeBelowThermal else rules.pauseAtThermal
            if (status >= limit) {
                val until = Thermal.word(rules.resumeBelowThermal)
                add(PauseCause.HEAT, "the phone is hot (thermal status ${Thermal.word(status)}); continues below $until", status, rules.resumeBelowThermal)
            }
        }
        health.batteryPercent?.let { percent ->
            val low = PauseCause.BATTERY in pausedFor
            val limit = if (low) rules.batteryResumePercent else rules.batteryFloorPercent
            if (!health.charging && percent < limit) {
                add(PauseCause.BATTERY, "the battery is at $percent%; continues from ${rules.batteryResumePercent}% or with a charger", percent, rules.batteryResumePercent)
            }
        }
        if (rules.onlyWhileCharging && !health.charging) {
            add(PauseCause.NOT_CHARGING, "no charger is connected, and you chose to train only while charging")
        }
        rules.pauseAtMemory?.let { limit ->
            // A pause gives memory back, and the next step takes it again: go on only when there is some to spare.
            val below = if (limit > MemoryPressure.MODERATE) MemoryPressure.values()[limit.ordinal - 1] else limit
            if (health.memoryPressure >= (if (PauseCause.MEMORY in pausedFor) below else limit)) {
                val level = health.memoryPressure.name.lowercase()
                add(PauseCause.MEMORY, "other apps need memory (pressure $level); continues below ${below.name.lowercase()}", health.memoryPressure, below)
            }
        }
        health.freeDiskBytes?.let { free ->
            if (free < rules.diskFloorBytes) {
                val mib = { bytes: Long -> "${bytes shr 20} MiB" }
                add(PauseCause.DISK, "only ${mib(free)} of storage are free; continues from ${mib(rules.diskFloorBytes)}", free, rules.diskFloorBytes)
            }
        }
        return found
    }
}
