package org.ondevice.app

import android.content.Context
import org.ondevice.core.Json
import org.ondevice.core.Rules
import org.ondevice.core.Storage
import java.io.File

/**
 * What the user asked for when starting a run; with it a killed process goes on where it was.
 *
 * @property attempts starts since something was last saved: a process that dies at the same step again and again is not
 *   started for ever.
 */
data class RunPlan(
    val id: String,
    val model: String,
    val data: String,
    val steps: Int,
    val learningRate: Double,
    val rules: Rules,
    val startAdapter: String? = null,
    val paused: Boolean = false,
    val attempts: Int = 0,
) {
    fun toJson(): String = Json.write(
        linkedMapOf(
            "id" to id, "model" to model, "data" to data, "steps" to steps, "learning_rate" to learningRate,
            "start_adapter" to startAdapter, "paused" to paused, "attempts" to attempts,
            "pause_at_thermal" to rules.pauseAtThermal, "resume_below_thermal" to rules.resumeBelowThermal,
            "battery_floor_percent" to rules.batteryFloorPercent, "battery_resume_percent" to rules.batteryResumePercent,
            "only_while_charging" to rules.onlyWhileCharging,
        ),
        "  ",
    ) + "\n"

    companion object {
        fun parse(text: String): RunPlan {
            val values = Json.parse(text) as Map<*, *>
            fun text(name: String) = values[name] as String
            fun int(name: String) = (values[name] as Number).toInt()
            return RunPlan(
                text("id"), text("model"), text("data"), int("steps"), (values["learning_rate"] as Number).toDouble(),
                Rules(
                    pauseAtThermal = int("pause_at_thermal"),
                    resumeBelowThermal = int("resume_below_thermal"),
                    batteryFloorPercent = int("battery_floor_percent"),
                    batteryResumePercent = int("battery_resume_percent"),
                    onlyWhileCharging = values["only_while_charging"] as Boolean,
                ),
                values["start_adapter"] as String?, values["paused"] as Boolean, (values["attempts"] as? Number)?.toInt() ?: 0,
            )
        }
    }
}

/** The one run that is to go on: a file, so that it outlives the process. */
class WantedRun(private val file: File) {
    /** The plan, or null when nothing is to run; a file that cannot be read counts as nothing. */
    fun read(): RunPlan? {
        if (!file.isFile) return null
        return try {
            RunPlan.parse(file.readText())
        } catch (_: Exception) {
            null
        }
    }

    fun write(plan: RunPlan) = Storage.atomicWrite(file, plan.toJson())

    fun clear() {
        file.delete()
    }

    companion object {
        /** Start the service for a wanted run that is not running and that the user did not pause; or say that it waits. */
        fun goOn(context: Context) {
            val app = context.applicationContext as OndeviceApp
            val plan = app.wanted.read() ?: return
            if (plan.paused || app.runs.live?.isOver == false) return
            try {
                context.startForegroundService(TrainService.intent(context))
            } catch (_: IllegalStateException) { // Android 12 and later, from the background
                Notifications(context).run { show(Notifications.WAITING, waiting()) }
            }
        }
    }
}
