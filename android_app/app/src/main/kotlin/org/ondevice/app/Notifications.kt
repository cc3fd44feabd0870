package org.ondevice.app

import android.app.Notification
import android.app.NotificationChannel
import android.app.NotificationManager
import android.app.PendingIntent
import android.content.Context
import android.content.Intent
import android.graphics.drawable.Icon
import org.ondevice.core.TrainerState

/** What the app says while it is not in front. */
class Notifications(private val context: Context) {
    private val manager = context.getSystemService(Context.NOTIFICATION_SERVICE) as NotificationManager

    init {
        val channel = NotificationChannel(CHANNEL, context.getString(R.string.channel_training), NotificationManager.IMPORTANCE_LOW)
        manager.createNotificationChannel(channel)
    }

    fun show(id: Int, notification: Notification) = manager.notify(id, notification)

    /** The running training, with buttons to pause and to stop it. */
    fun training(live: Runs.Live?): Notification {
        val builder = builder(context.getString(R.string.notify_training))
        val state = live?.state
        if (live == null || state == null) return builder.setContentText(context.getString(R.string.preparing)).build()
        val progress = context.getString(R.string.step_of, Words.number(live.stepsDone), Words.number(live.plan.steps))
        val paused = state as? TrainerState.Paused
        builder.setContentText(if (paused == null) progress else context.getString(R.string.notify_paused, progress, paused.reasons.joinToString("; ") { Words.reason(context, it) }))
            .setProgress(live.plan.steps, live.stepsDone, false)
            .setOngoing(true)
        builder.addAction(if (live.pauseAsked) action(R.string.resume, TrainService.RESUME) else action(R.string.pause, TrainService.PAUSE))
        return builder.addAction(action(R.string.stop, TrainService.STOP)).build()
    }

    /** A fleet's round that is worked on. */
    fun round(live: FleetRounds.Live): Notification {
        val steps = live.offer.task?.localSteps ?: 1
        val progress = context.getString(R.string.local_step_of, Words.number(live.step), Words.number(steps))
        val words = if (live.reasons.isEmpty()) progress else context.getString(R.string.notify_paused, progress, live.reasons.joinToString("; ") { Words.reason(context, it) })
        return builder(context.getString(R.string.notify_round), FLEET_TAB).setContentText(words).setProgress(steps, live.step, false).setOngoing(true)
            .addAction(action(R.string.stop, TrainService.STOP)).build()
    }

    /** The end of a round: its answer is to be shared, or it failed. */
    fun roundOver(live: FleetRounds.Live): Notification {
        val title = if (live.taken?.answer != null) R.string.answer_ready else R.string.notify_round_over
        return builder(context.getString(title), FLEET_TAB).setContentText(live.error?.what ?: live.offer.name).setAutoCancel(true).build()
    }

    /** Training could go on, and the system does not let the app start by itself: the user's tap may. */
    fun waiting(): Notification =
        builder(context.getString(R.string.notify_waiting)).setContentText(context.getString(R.string.notify_waiting_words)).setAutoCancel(true).build()

    /** The end of a run. */
    fun over(live: Runs.Live): Notification {
        val words = if (live.savedAdapter != null) context.getString(R.string.step_of, Words.number(live.stepsDone), Words.number(live.plan.steps))
        else (live.error ?: (live.state as? TrainerState.Failed)?.error)?.what ?: context.getString(R.string.unknown)
        return builder(context.getString(R.string.notify_over)).setContentText(words).setAutoCancel(true).build()
    }

    private fun builder(title: String, tab: Int = TRAIN_TAB): Notification.Builder {
        val open = Intent(context, MainActivity::class.java).putExtra(MainActivity.TAB, tab).addFlags(Intent.FLAG_ACTIVITY_SINGLE_TOP)
        return Notification.Builder(context, CHANNEL)
            .setSmallIcon(R.drawable.notification)
            .setContentTitle(title)
            .setColor(context.getColor(R.color.accent))
            .setOnlyAlertOnce(true)
            .setContentIntent(PendingIntent.getActivity(context, tab, open, FLAGS))
    }

    private fun action(label: Int, name: String): Notification.Action {
        val intent = PendingIntent.getService(context, name.hashCode(), TrainService.intent(context, name), FLAGS)
        return Notification.Action.Builder(Icon.createWithResource(context, R.drawable.notification), context.getString(label), intent).build()
    }

    companion object {
        const val TRAINING = 1
        const val WAITING = 2
        private const val TRAIN_TAB = 2
        private const val FLEET_TAB = MainActivity.FLEET
        private const val CHANNEL = "training"
        private const val FLAGS = PendingIntent.FLAG_UPDATE_CURRENT or PendingIntent.FLAG_IMMUTABLE
    }
}
